"""`terrazzo train`: start a user's script on all ranks, and restart it after a crash.

One file describes the run, and the script reads it, too; starting and watching processes is done by torchrun.
"""

from terrazzo.engine.marks import beat
from terrazzo.launch.config import Run, read_run
from terrazzo.launch.stopping import Stopped, StopSignal

__all__ = ["Run", "StopSignal", "Stopped", "beat", "read_run"]
