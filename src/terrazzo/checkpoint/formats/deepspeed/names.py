"""What the pickles in DeepSpeed's files may refer to, besides PyTorch's tensors: plain data, all of it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from terrazzo.checkpoint.formats import unpickle
from terrazzo.checkpoint.formats.stand_ins import Call, Record
from terrazzo.checkpoint.formats.torch_archive import TORCH_NAMES
from terrazzo.errors import CheckpointCorruptError, UnsafePickleError


class _Fields(Record):
    """An object whose attributes are all there is to it, as a dict of them."""

    __slots__ = ()
    made_of = "deepspeed"

    def finish(self) -> dict[str, Any]:
        return dict(self.fields)


class _TensorClass:
    """`torch.Tensor` itself, which says that a tensor is of no other class."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickleError("a pickle tries to change a class")


def _with_attributes(rebuild: Any, kind: Any, args: Any, attributes: Any) -> Any:
    """A plain tensor on which DeepSpeed has hung attributes, without them."""
    if not isinstance(rebuild, Call) or not isinstance(kind, _TensorClass) or type(args) is not tuple:
        raise UnsafePickleError("a pickle makes a tensor of a class that is not known")
    return rebuild(*args)


def _stage(value: Any) -> int:
    if value not in (0, 1, 2, 3):
        raise CheckpointCorruptError(f"a pickle names the ZeRO stage {value!r}")
    return int(value)


NAMES: Final[unpickle.Names] = MappingProxyType(
    {
        **TORCH_NAMES,
        ("torch", "Tensor"): _TensorClass(),
        ("torch._tensor", "_rebuild_from_type_v2"): Call(_with_attributes),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"): Call(_stage),
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): _Fields,
        ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): _Fields,
        ("deepspeed.utils.tensor_fragment", "fragment_address"): _Fields,
        ("deepspeed.checkpoint.utils", "SubparamShape"): _Fields,
    }
)
