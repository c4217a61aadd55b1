"""A parameter that counts all writes that its user makes, also those through `.data`, which PyTorch does not count."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, nn

from terrazzo._torch.tensors import version_of

_ALIAS: Final = "_terrazzo_data"  # what `.data` returns aliases of
_COUNT: Final = "_terrazzo_writes"  # the writes to former ones
OWN_ATTRIBUTES: Final = (_ALIAS, _COUNT)

_DATA: Any = Tensor.data


class CountingParameter(nn.Parameter):
    """An `nn.Parameter` for everybody else; copies and pickles as one."""

    @property
    def data(self) -> Tensor:
        alias = self.__dict__.get(_ALIAS)
        if alias is None:
            alias = self.__dict__[_ALIAS] = _DATA.__get__(self)
        data: Tensor = alias.detach()  # it counts as the alias does, not as the parameter: autograd must not notice
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        alias = self.__dict__.pop(_ALIAS, None)
        if alias is not None:
            self.__dict__[_COUNT] = self.__dict__.get(_COUNT, 0) + _writes_through(alias)
        _DATA.__set__(self, value)

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


def writes_to(parameter: Tensor) -> int:
    """How often a parameter was written to; of one that counts, with the writes through `.data`."""
    more = parameter.__dict__
    alias = more.get(_ALIAS)
    own: int = version_of(parameter) + more.get(_COUNT, 0)
    return own if alias is None else own + _writes_through(alias)


def _writes_through(alias: Tensor) -> int:
    return 1 if alias.is_inference() else version_of(alias)  # what torch.inference_mode has made counts nothing
