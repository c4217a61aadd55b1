"""A PyTorch device that is late on purpose: prove on a laptop that code with streams does not rely on luck.

from terrazzo.testing import late

def test_my_streams():
    with late.checked():                    # raises RaceError at its end
        x = torch.ones(8, device="late")
        ...

The device `late` computes with PyTorch's CPU kernels in the host's memory. Its streams, events, caching allocator,
pinned memory and process groups behave as those of CUDA and NCCL do: a launch returns at once, and what was launched
runs later, in an order that a mode and a seed choose. The race detector compares all accesses to memory, whatever ran
first.

It is compiled when it is first used, which needs g++ and about a minute; the library is kept in the user's cache.
"""

from terrazzo.testing.late.checking import MODES, checked, host_waits, races, schedule
from terrazzo.testing.late.group import init_process_group
from terrazzo.testing.late.reports import Access, Race
from terrazzo.testing.late.starting import init

__all__ = ["MODES", "Access", "Race", "checked", "host_waits", "init", "init_process_group", "races", "schedule"]
