"""Which runs of DeepSpeed the tests compare with: ZeRO stage, precision and, of some, an option.

`master` accumulates bf16's gradients in float32, which in stage 1 is done by an optimizer with a layout of its own;
`small` divides stage 3's groups into small ones; `robin` has another order of parameters in the partitions.
"""

CASES = ("1-fp32", "1-fp16", "1-bf16-master", "2-bf16", "2-fp32-robin", "3-fp32-small", "3-fp16", "3-bf16")
UNIVERSAL = ("1-fp32", "2-bf16", "3-fp32-small")  # of these `ds_to_universal` makes universal checkpoints
STEPS, BEFORE = 6, 3  # a checkpoint is saved after BEFORE


def parsed(case: str) -> tuple[int, str, str]:
    """Stage, precision and option of a case."""
    stage, precision, *option = case.split("-")
    return int(stage), precision, "".join(option)
