"""Names that pickles in DeepSpeed's files may refer to, besides PyTorch's tensors; all are plain data."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from terrazzo.checkpoint.formats import unpickle
from terrazzo.checkpoint.formats.stand_ins import Call, record
from terrazzo.checkpoint.formats.torch_archive import TORCH_NAMES
from terrazzo.errors import CheckpointCorruptError, UnsafePickleError


class _TensorClass:
    """A stand-in for the class `torch.Tensor`."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickleError("a pickle tries to change a class")


def _with_attributes(rebuild: Any, kind: Any, args: Any, attributes: Any) -> Any:
    """A tensor without the attributes that DeepSpeed has set on it."""
    if not isinstance(rebuild, Call) or not isinstance(kind, _TensorClass) or type(args) is not tuple:
        raise UnsafePickleError("a pickle makes a tensor of an unknown class")
    return rebuild(*args)


def _stage(value: Any) -> int:
    if value not in (0, 1, 2, 3):
        raise CheckpointCorruptError(f"a pickle names the ZeRO stage {value!r}")
    return int(value)


_FIELDS: Final = record("deepspeed", lambda self: dict(self.fields))  # an object, as a dict of its attributes
NAMES: Final[unpickle.Names] = MappingProxyType(
    {
        **TORCH_NAMES,
        ("torch", "Tensor"): _TensorClass(),
        ("torch._tensor", "_rebuild_from_type_v2"): Call(_with_attributes),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"): Call(_stage),
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): _FIELDS,
        ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): _FIELDS,
        ("deepspeed.utils.tensor_fragment", "fragment_address"): _FIELDS,
        ("deepspeed.checkpoint.utils", "SubparamShape"): _FIELDS,
    }
)
