"""Benchmarks: terrazzo against PyTorch, DeepSpeed and plain tensors, on the same machine in the same run.

    python -m benchmarks                     every case
    python -m benchmarks ops fsdp.narrow     a topic, a case
    python -m benchmarks --quick --json out.json

`bench_<topic>.py` holds the cases of a topic. A case is a function that is called once on every rank of its world,
with the default gloo group initialised and one torch thread. It sets up, and returns what takes turns:

    from benchmarks.cases import Budget, Implementations, Setting, case

    @case(budget=Budget("overhead", 0.5))
    def add(setting: Setting) -> Implementations:
        plain = torch.ones(8, 8)
        ours, theirs = distribute(plain), distribute_with_torch(plain)
        return {
            "plain": lambda: plain + plain,
            "terrazzo": lambda: ours + ours,
            "torch": lambda: theirs + theirs,
        }

Implementations take turns within one process, sample by sample, so that whatever slows the machine slows all of them,
and only ratios are judged. A sample is the time of one call, averaged over as many calls as make it long enough to
measure, on the slowest rank. `case(unit="MB")` is for what is not a time: there every call returns its own sample.

Reported are each implementation's median, and for terrazzo the ratios: `time` is its time over another's, `speed` the
inverse, and `overhead` what it costs over plain tensors, relative to what torch costs over them. A case may state its
budget as one of these or, as `value`, in its own unit; the table says whether it was kept. Times are never asserted by
a test.
"""
