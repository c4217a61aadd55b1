"""Starting the device: once per process, as torch has room for one device that it does not know by itself."""

from __future__ import annotations

import atexit

from terrazzo._torch import devices as torchs
from terrazzo.errors import LateDeviceError
from terrazzo.testing.late import build

_MOST = 16
_started: tuple[int, str] | None = None


def init(*, devices: int = 4, backend_name: str = "late") -> None:
    """Compile the device if that is needed, and register it with torch; further calls do nothing.

    The other functions call it. A process can have one device of a kind that torch does not know by itself, so this one
    excludes others.

    Args:
        devices: How many there are: `late:0`, `late:1` and so on.
        backend_name: What the backend of process groups calls itself: `"nccl"` for programs that do more with NCCL.

    Raises:
        DeviceBuildError: The device cannot be compiled here; the message says what to install.
    """
    global _started
    if _started is not None:
        if (devices, backend_name) not in (_started, (4, "late")):
            raise LateDeviceError(
                f"the device `late` was started with devices={_started[0]} and backend_name={_started[1]!r}, and "
                f"cannot be started again with devices={devices} and backend_name={backend_name!r}: call init() first"
            )
        return
    if not 1 <= devices <= _MOST:
        raise LateDeviceError(f"`devices` must be from 1 to {_MOST}, not {devices}")
    if backend_name not in ("late", "nccl"):
        raise LateDeviceError(f"`backend_name` must be 'late' or 'nccl', not {backend_name!r}")
    library = build.load()
    from terrazzo.testing.late import backend, torch_late

    torch_late.register(devices, torchs.register_device_module)
    backend.register(backend_name)
    atexit.register(library.stop)  # its thread must not run while Python ends
    _started = devices, backend_name
