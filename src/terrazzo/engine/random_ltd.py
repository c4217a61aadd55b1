"""Random layer-token dropping: inner layers process a random subset of the tokens, which grows until it has all.

The other tokens skip the layer. The choice depends on seed, step and layer only, so a resumed run makes the same
choices, on any number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.config import EngineConfig
from terrazzo.engine.curriculum import Ramp, token_schedule
from terrazzo.engine.seeds import generator_for
from terrazzo.errors import EngineConfigError, EngineError


class RandomLTD:
    """Drops tokens before some of a model's layers, and puts them back after them.

    Attributes:
        current_tokens: how many tokens each of these layers keeps in this step.
        consumed_layer_tokens: the number of tokens that layers processed, over all layers and the samples of all ranks.
    """

    def __init__(self, layers: dict[int, nn.Module], schedule: Ramp, seed: int, token_dim: int) -> None:
        self._schedule = schedule
        self._seed = seed
        self._token_dim = token_dim
        self._step = 0
        self.current_tokens = schedule.at(0)
        self.consumed_layer_tokens = 0
        self._kept: dict[int, int] = {}  # per layer, in its last forward
        for number, layer in layers.items():
            _Dropping(self, number, layer)

    @staticmethod
    def of(config: EngineConfig, model: nn.Module) -> RandomLTD | None:
        """What the config asks for; None if it asks for no random-LTD."""
        routing = config.data_efficiency.data_routing
        ltd = routing.random_ltd
        if not (config.data_efficiency.enabled and routing.enabled and ltd.enabled):
            return None
        assert ltd.random_ltd_schedule is not None  # the config's check requires it
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        if not lists:
            raise EngineConfigError("config: random_ltd needs the model's layers to be in an nn.ModuleList")
        layers = max(lists, key=len)
        wrong = [i for i in ltd.random_ltd_layer_id if not 0 <= i < len(layers)]
        if wrong:
            raise EngineConfigError(f"config: random_ltd_layer_id has {wrong}, but the model has {len(layers)} layers")
        token_dim = 1 if ltd.hidden_state_order == "batch_seq_dim" else 0
        chosen = {i: layers[i] for i in ltd.random_ltd_layer_id}
        return RandomLTD(chosen, token_schedule(ltd.random_ltd_schedule), config.data_efficiency.seed, token_dim)

    def begin_forward(self, step: int) -> None:
        """Called when the forward of a micro-batch of this step starts."""
        self._step = step
        self.current_tokens = self._schedule.at(step)

    def end_step(self, step: int, samples: int) -> None:
        """Called with the number of steps taken, and the samples of the last one."""
        self.consumed_layer_tokens += samples * sum(self._kept.values())
        self.current_tokens = self._schedule.at(step)

    def kept(self, layer: int, x: Tensor) -> Tensor | None:
        """The positions, in order, of the tokens that a layer processes; None for all."""
        total = x.shape[self._token_dim]
        keep = min(self.current_tokens, total)
        self._kept[layer] = keep
        if keep == total:
            return None
        generator = generator_for(self._seed, "random_ltd", self._step, layer)
        return torch.randperm(total, generator=generator, device="cpu")[:keep].sort().values.to(x.device)

    def select(self, x: Tensor, positions: Tensor) -> Tensor:
        """Only the tokens at these positions."""
        return x.index_select(self._token_dim, positions)

    def put_back(self, x: Tensor, positions: Tensor, part: Tensor) -> Tensor:
        """All tokens, with those at these positions replaced."""
        return x.index_copy(self._token_dim, positions, part.to(x.dtype))

    def state_dict(self) -> dict[str, Any]:
        return {"current_tokens": self.current_tokens, "consumed_layer_tokens": self.consumed_layer_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current_tokens = int(state["current_tokens"])
        self.consumed_layer_tokens = int(state["consumed_layer_tokens"])


class _Dropping:
    """Hooks around one layer, whose first argument and (first) output are the tokens."""

    def __init__(self, ltd: RandomLTD, number: int, layer: nn.Module) -> None:
        self._ltd, self._number = ltd, number
        self._calls: list[tuple[Tensor, Tensor] | None] = []
        layer.register_forward_pre_hook(self._before)
        layer.register_forward_hook(self._after)

    def _before(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not layer.training:
            self._calls.append(None)
            return None
        if not args or not isinstance(args[0], Tensor) or args[0].ndim < 3:
            raise EngineError(
                f"random_ltd: layer {self._number} must get its hidden states as its first argument, a tensor with "
                "dims for batch, tokens and width"
            )
        positions = self._ltd.kept(self._number, args[0])
        self._calls.append(None if positions is None else (args[0], positions))
        return None if positions is None else (self._ltd.select(args[0], positions), *args[1:])

    def _after(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call = self._calls.pop()
        if call is None:
            return None
        x, positions = call
        if isinstance(output, tuple):
            return (self._ltd.put_back(x, positions, output[0]), *output[1:])
        return self._ltd.put_back(x, positions, output)
