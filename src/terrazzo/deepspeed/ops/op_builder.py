"""Which of DeepSpeed's operators there are, under the names of its builders: scripts ask before they use one.

Nothing is compiled here. An operator is there if terrazzo has what it does: the optimizers.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from terrazzo.errors import EngineError

_HERE = {
    "CPUAdagrad": "cpu_adagrad",
    "CPUAdam": "cpu_adam",
    "CPULion": "cpu_lion",
    "FusedAdam": "fused_adam",
    "FusedLamb": "fused_lamb",
    "FusedLion": "fused_lion",
}
_ABSENT = {
    "AsyncIO": "async_io",
    "CCLComm": "deepspeed_ccl_comm",
    "EvoformerAttn": "evoformer_attn",
    "FPQuantizer": "fp_quantizer",
    "GDS": "gds",
    "Inference": "transformer_inference",
    "Quantizer": "quantizer",
    "RandomLTD": "random_ltd",
    "ShareMemComm": "deepspeed_shm_comm",
    "SparseAttn": "sparse_attn",
    "SpatialInference": "spatial_inference",
    "StochasticTransformer": "stochastic_transformer",
    "Transformer": "transformer",
    "Utils": "utils",
}


class OpBuilder:
    """The name of an operator, and whether it is there.

    >>> CPUAdamBuilder.NAME, CPUAdamBuilder().is_compatible(), AsyncIOBuilder().is_compatible()
    ('cpu_adam', True, False)
    """

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether terrazzo has the operator."""
        return COMPATIBLE[self.NAME]

    def load(self, verbose: bool = False) -> NoReturn:
        """Raises: there is no compiled module."""
        raise EngineError(f"there is no compiled operator {self.NAME}: use the classes of terrazzo.deepspeed.ops")


COMPATIBLE: Final = {**dict.fromkeys(_HERE.values(), True), **dict.fromkeys(_ABSENT.values(), False)}
ALL_OPS: Final[dict[str, Any]] = {
    name: type(f"{kind}Builder", (OpBuilder,), {"NAME": name}) for kind, name in {**_HERE, **_ABSENT}.items()
}
globals().update({each.__name__: each for each in ALL_OPS.values()})
