"""`sequence_parallel_size`: ranks that share each sequence, of which each computes one part.

The engine cuts what the model gets along the sequence, and attention inside the model is over the whole of it (see
`terrazzo.tensor.experimental.context_parallel`). Parts are consecutive, so that a model which is given their positions
sees one sequence. Ranks that share a sequence hold shards as data-parallel ranks do, and gradients are the mean over
both.

Hugging Face's models get what they need so that their loss is that of one device: positions, labels that are shifted
before they are cut, and the number of labels of the whole sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from terrazzo._torch.dispatching import tree_map
from terrazzo.comm import Axis, collectives
from terrazzo.engine.config import EngineConfig
from terrazzo.errors import EngineConfigError, EngineError
from terrazzo.tensor.experimental.context_parallel import AttentionOver, attention_over

_IGNORED = -100  # the label that Hugging Face's losses leave out
# Hugging Face's models with a result for a whole sequence, and arguments that such models have.
_OF_WHOLE = (
    *("ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentence", "ForPreTrain"),
    *("DoubleHeads", "ForImageClassification", "ForAudioClassification", "ForXVector", "ForCTC", "Retrieval"),
)
_NOT_SHIFTED = ("ForMaskedLM", "ForTokenClassification")  # whose loss is a mean over positions, whoever computes it
_FOR_WHOLE = ("start_positions", "end_positions", "next_sentence_label")


class SharedSequences:
    """What the ranks of an axis do that share sequences."""

    def __init__(self, config: EngineConfig, axis: Axis, module: Any) -> None:
        self._axis, self._method = axis, config.sequence_parallel_method
        if hasattr(module, "get_base_model"):  # of peft, whose model passes its arguments on
            _refuse_prompts(module)
            module = module.get_base_model()
        self._module = module
        loss = getattr(module, "loss_function", None)
        self._kind = _kind_of(module)
        self._of_transformers = loss is not None and hasattr(module, "config")
        type_of_loss = str(getattr(module, "loss_type", None))
        is_default = getattr(loss, "__name__", "") == "ForCausalLMLoss"
        self._computes_loss = not _calls_loss_function(type(module)) and type_of_loss not in _NOT_SHIFTED
        self._shifts = is_default or "ForCausalLM" in type_of_loss or "ForCausalLM" in self._kind
        is_causal = getattr(getattr(module, "config", None), "is_causal", True)
        self._is_causal = is_causal and any(getattr(m, "is_causal", False) for m in module.modules())

    def part(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's part along the sequence."""
        n = self._axis.size
        if tensor.shape[dim] % n:
            raise EngineError(
                f"sequence_parallel_size: {tensor.shape[dim]} positions on dim {dim} of a tensor of shape "
                f"{tuple(tensor.shape)} cannot be shared evenly by {n} ranks: pad the sequence to a multiple of {n}"
            )
        return tensor.chunk(n, dim)[self._axis.index].contiguous()

    @contextmanager
    def attention(self) -> Iterator[None]:
        """A block in which the model runs on this rank's part."""
        context = AttentionOver(self._axis, self._method, balanced=False)
        with attention_over(context):
            yield
        if not context.calls:
            raise EngineError(
                "sequence_parallel_size: the model has not called torch's scaled_dot_product_attention, so its "
                "attention has seen only a part of the sequence: for Hugging Face's models pass "
                "attn_implementation='sdpa'"
            )

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments, with tensors that have the batch as dim 0 and the sequence as dim 1 cut along it."""
        named = [kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None]
        tensors = [t for t in (*named, *args, *kwargs.values()) if isinstance(t, Tensor) and t.dim() >= 2]
        if not tensors:
            raise EngineError("sequence_parallel_size: no argument of the model has a sequence as dim 1")
        batch, length = tensors[0].shape[:2]
        if self._of_transformers:
            kwargs = self._prepared(kwargs, tensors[0], length)
        whole = {"attention_mask"} if getattr(kwargs.get("attention_mask"), "ndim", 0) == 4 else set()

        def mine(name: object, value: Any) -> Any:
            if name == "position_ids" and isinstance(value, Tensor) and value.dim() == 3:
                return self.part(value, 2)  # several kinds of positions, as with images
            if name in whole or not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != length:
                return value
            if value.shape[0] in (1, batch):
                return self.part(value)
            raise EngineError(
                f"sequence_parallel_size: does the argument {name!r} of shape {tuple(value.shape)} have the sequence "
                f"of {length} positions? One that has it begins with {batch} samples, or 1 for all, and the positions. "
                "Pad the sequence to another length, or let the model have this tensor as a buffer"
            )

        return tuple(mine(i, v) for i, v in enumerate(args)), {name: mine(name, v) for name, v in kwargs.items()}

    def averaged(self, outputs: Any) -> Any:
        """The model's outputs, with the values of losses averaged over the ranks; their gradients stay this rank's."""

        def mean(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()):
                return value
            whole = collectives.all_reduce(value.detach(), self._axis, "avg")
            return value + (whole - value.detach()) if value.requires_grad else whole

        return tree_map(mean, outputs)

    # ------------------------------------------------------------------ Hugging Face's models

    def _prepared(self, kwargs: dict[str, Any], first: Tensor, length: int) -> dict[str, Any]:
        self._refuse_windows(length)
        kwargs, kind = dict(kwargs), self._kind
        if any(type(part).__name__.endswith("Pooler") for part in self._module.modules()):
            self._refuse_whole(f"a {kind} with a pooler", length)
        if any(name in kind for name in _OF_WHOLE) or any(kwargs.get(name) is not None for name in _FOR_WHOLE):
            self._refuse_whole(f"a {kind}", length)
        if "position_ids" not in inspect.signature(self._module.forward).parameters:
            raise EngineError(
                f"sequence_parallel_size: a {kind} does not take position_ids, so each rank would count the positions "
                "of its part from 0: use another model, or leave the key out"
            )
        if getattr(self._module.config, "is_encoder_decoder", False):
            raise EngineError(
                f"sequence_parallel_size: a {kind} has an encoder and a decoder, with sequences of their own: use "
                "another model, or leave the key out"
            )
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = torch.arange(length, device=first.device).expand(first.shape[0], length)
        labels, mask = kwargs.get("labels"), kwargs.get("attention_mask")
        if labels is not None and self._computes_loss:
            raise EngineError(
                f"sequence_parallel_size: a {kind} computes its loss by itself, of each part alone, which may not be "
                "that of the whole sequence: compute the loss outside of the model, see Engine.sequences"
            )
        if labels is not None and self._shifts:
            if kwargs.get("shift_labels") is None:
                kwargs["shift_labels"] = nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:].contiguous()
            count = kwargs.get("num_items_in_batch")
            # A rank's loss is its sum times the ranks over all labels, so that the ranks' mean is the whole's.
            count = (kwargs["shift_labels"] != _IGNORED).sum() if count is None else count
            kwargs["num_items_in_batch"] = count / self._axis.size
        elif labels is not None:
            self._check_labels(labels, length)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            kwargs["attention_mask"] = None if bool(mask.all()) else self._rows_of_mask(mask)
        elif isinstance(mask, Tensor) and mask.dim() == 4:
            kwargs["attention_mask"] = mask if mask.shape[2] == 1 else self.part(mask, 2)
        return kwargs

    def _check_labels(self, labels: Tensor, length: int) -> None:
        """Raise if the loss is not the mean of the losses of the parts."""
        if labels.dim() < 2 or labels.shape[1] != length:
            self._refuse_whole(f"a {self._kind} with labels of shape {tuple(labels.shape)}", length)
        counts = torch.stack([(part != _IGNORED).sum() for part in labels.chunk(self._axis.size, 1)]).tolist()
        if len(set(counts)) > 1:
            raise EngineError(
                f"sequence_parallel_size: the parts of the sequence have {counts} labels that count (others are "
                f"{_IGNORED}), and a {self._kind} takes the mean of each part: compute the loss "
                "outside of the model, see Engine.sequences"
            )

    def _refuse_whole(self, model: str, length: int) -> NoReturn:
        raise EngineError(
            f"sequence_parallel_size: {model} has a result for a whole sequence of {length} positions, of which each "
            "rank has a part: leave the key out"
        )

    def _rows_of_mask(self, mask: Tensor) -> Tensor:
        """Which keys of the whole sequence each of this rank's queries sees, from a mask of padding."""
        positions = torch.arange(mask.shape[1], device=mask.device)
        rows = self.part(positions, 0)
        seen = mask.bool()[:, None, None, :].expand(-1, 1, len(rows), -1)
        return seen & (positions <= rows[:, None]) if self._is_causal else seen

    def _refuse_windows(self, length: int) -> None:
        config: Any = self._module.config
        kind = getattr(config, "_attn_implementation")  # noqa: B009  # Transformers has no public name for it
        if kind != "sdpa":
            raise EngineError(f"sequence_parallel_size needs a model with attn_implementation='sdpa', not {kind!r}")
        kinds = set(getattr(config, "layer_types", None) or [])
        local = {k for k in kinds if k != "full_attention"}
        if not kinds and getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
            local = {"sliding_attention"}
        window = getattr(config, "sliding_window", None) or 0
        if local and not (local == {"sliding_attention"} and window >= length):
            raise EngineError(
                f"sequence_parallel_size does not support {', '.join(sorted(local))} (a window of {window} in "
                f"sequences of {length}): use a model with full attention, or leave the key out"
            )


def _kind_of(module: nn.Module) -> str:
    """The name of a module's class: of Transformers' own, if a user's class or that of `fully_shard` is built on it."""
    names = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("transformers")]
    return names[0] if names else type(module).__name__


def _calls_loss_function(kind: type) -> bool:
    """Whether a model's forward leaves its loss to Transformers' function, which knows the labels of all parts."""
    for forward in (vars(each)["forward"] for each in kind.__mro__ if "forward" in vars(each)):
        code = getattr(inspect.unwrap(forward), "__code__", None)
        names = () if code is None else code.co_names
        if "super" not in names:
            return "loss_function" in names
    return False


def _refuse_prompts(module: Any) -> None:
    if getattr(module.active_peft_config, "is_prompt_learning", False):
        raise EngineConfigError(
            "sequence_parallel_size: peft puts a prompt before the sequence, which would be put before each part of "
            "it: use an adapter without a prompt, such as LoRA"
        )
