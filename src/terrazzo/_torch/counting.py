"""A parameter that counts all writes that its user makes, also those to and through `.data`, which PyTorch does not
count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor, nn

from terrazzo._torch.tensors import version_of

_ALIAS: Final = "_terrazzo_data"  # what `.data` returns aliases of
_COUNT: Final = "_terrazzo_writes"  # the writes to former ones, and to `.data` itself
OWN_ATTRIBUTES: Final = (_ALIAS, _COUNT)

_DATA: Any = Tensor.data


class Uses:
    """How often `.data` of any parameter that counts was asked for or set."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


uses: Final = Uses()


class CountingParameter(nn.Parameter):
    """An `nn.Parameter` for everybody else; copies and pickles as one."""

    @property
    def data(self) -> Tensor:
        uses.count += 1
        alias = self.__dict__.get(_ALIAS)
        if alias is None:
            alias = self.__dict__[_ALIAS] = _DATA.__get__(self)
        data: Tensor = alias.detach()  # it counts as the alias does, not as the parameter: autograd must not notice
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        set_uncounted(self, value)
        self._note_move()

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        self._note_move()
        return super().set_(*args, **kwargs)

    def _note_move(self) -> None:
        uses.count += 1
        self.__dict__[_COUNT] = self.__dict__.get(_COUNT, 0) + 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach(), self.requires_grad)
        plain.__dict__.update({name: value for name, value in self.__dict__.items() if name not in OWN_ATTRIBUTES})
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied: nn.Parameter = nn.Parameter(self.detach(), self.requires_grad).__deepcopy__(memo)
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # of no use, as in PyTorch's
        return repr(nn.Parameter(self.detach(), self.requires_grad))


def count_from_now(parameter: Tensor) -> None:
    """Make a parameter that was exchanged (`torch.utils.swap_tensors`) one that counts."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = CountingParameter


def set_uncounted(parameter: Tensor, value: Tensor) -> None:
    """Set `.data`, and do not count it as a write."""
    alias = parameter.__dict__.pop(_ALIAS, None)
    if alias is not None:
        parameter.__dict__[_COUNT] = parameter.__dict__.get(_COUNT, 0) + _writes_through(alias)
    _DATA.__set__(parameter, value)


def was_asked(parameters: Iterable[Tensor]) -> bool:
    """Whether `.data` of one of these parameters was read, through which a program may write without being counted."""
    return any(_ALIAS in parameter.__dict__ for parameter in parameters)


def writes_to(parameter: Tensor) -> int:
    """How often a parameter was written to; of one that counts, with the writes through `.data`."""
    more = parameter.__dict__
    alias = more.get(_ALIAS)
    own: int = version_of(parameter) + more.get(_COUNT, 0)
    return own if alias is None else own + _writes_through(alias)


def _writes_through(alias: Tensor) -> int:
    return 1 if alias.is_inference() else version_of(alias)  # what torch.inference_mode has made counts nothing
