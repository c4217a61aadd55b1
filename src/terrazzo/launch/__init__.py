"""`terrazzo train`: start a user's own script on all ranks, and start it again after a crash.

What a run needs to know is in one file, which the script reads too; starting and watching processes is torchrun's work.
"""

from terrazzo.launch.config import Run, read_run
from terrazzo.launch.stopping import Stopped, StopSignal

__all__ = ["Run", "StopSignal", "Stopped", "read_run"]
