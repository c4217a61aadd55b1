"""Access to memory and storage, which a DTensor refuses: one rank's memory holds only a part of the tensor."""

from __future__ import annotations

from typing import Any, NoReturn

from terrazzo.errors import DTensorError


class NoRawAccess:
    """Refuses everything that would expose a tensor's memory, and says what to use instead."""

    __slots__ = ()

    def numpy(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("numpy()")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("conversion to a numpy array")

    def data_ptr(self) -> NoReturn:
        _refuse("data_ptr()")

    def const_data_ptr(self) -> NoReturn:
        _refuse("const_data_ptr()")

    def untyped_storage(self) -> NoReturn:
        _refuse("untyped_storage()")

    def storage(self) -> NoReturn:
        _refuse("storage()")

    def _typed_storage(self) -> NoReturn:
        _refuse("typed storage")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("DLPack export")

    def __dlpack_device__(self) -> NoReturn:
        _refuse("DLPack export")

    def share_memory_(self) -> NoReturn:
        _refuse("share_memory_()")

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], NoRawAccess):
            self.data = args[0].detach()  # type: ignore[misc, attr-defined]  # both are DTensors
            return self
        _refuse("set_() of anything but a DTensor")

    def resize_(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("resize_()")

    @property
    def __cuda_array_interface__(self) -> Any:
        raise AttributeError("a DTensor has no __cuda_array_interface__: use to_local() or full_tensor()")


def _refuse(what: str) -> NoReturn:
    raise DTensorError(
        f"{what} is not possible for a DTensor, whose elements are spread over several ranks: use .to_local() for this "
        "rank's part or .full_tensor() for the whole"
    )


def refuse_export() -> NoReturn:
    _refuse("DLPack export")
