"""Converts a config in DeepSpeed's JSON to the engine's own sections, by the table in `deepspeed_keys`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from terrazzo._meant import meant
from terrazzo.engine.deepspeed_keys import AUTO, KEYS, LENIENT, SECTIONS
from terrazzo.errors import EngineConfigError


class Ignored(NamedTuple):
    """The keys of a config that have no effect here."""

    harmless: list[str]
    warned: dict[str, str]  # with the reason; in DeepSpeed these change memory, or what is checked

    def warning(self) -> str:
        """What to warn about, with the reasons; empty if there is nothing."""
        reasons: dict[str, list[str]] = {}
        for key, why in self.warned.items():
            reasons.setdefault(why, []).append(key)
        return "; ".join(f"{', '.join(keys)} ({why})" for why, keys in reasons.items())


def translate(given: Mapping[str, Any]) -> tuple[dict[str, Any], Ignored]:
    """The keys that the engine has, and the names of those that have no effect here.

    A key that is in neither table is passed on, so that the engine's own check names it.

    >>> zero = {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 1000}
    >>> kept, ignored = translate({"train_batch_size": 8.0, "zero_optimization": zero})
    >>> kept
    {'train_batch_size': 8, 'zero_optimization': {'stage': 3}}
    >>> ignored
    Ignored(harmless=['zero_optimization.overlap_comm'], warned={'zero_optimization.reduce_bucket_size': 'what ...'})
    """
    ignored = Ignored([], {})
    kept = _section(_renamed(given), "", ignored)
    zero = kept.get("zero_optimization")
    if isinstance(zero, dict) and "offload_param" in zero and zero.get("stage", 0) in (0, 1, 2):
        if zero.pop("offload_param").get("device") == "cpu":
            ignored.warned["zero_optimization.offload_param"] = "parameters are offloaded in stage 3 only"
    return kept, ignored


def without_unknown(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A config without the keys that neither DeepSpeed nor terrazzo knows where DeepSpeed ignores them, and these.

    It ignores them at the top, where scripts have keys for themselves, and in some sections.

    >>> without_unknown({"train_batch_size": 4, "gradient_cliping": 1.0, "mine": 1, "aio": {"thread_count": 1}})
    ({'train_batch_size': 4, 'aio': {}}, {'gradient_cliping': 'unknown; did you mean gradient_clipping?', ...})
    """
    warned: dict[str, str] = {}

    def known_in(section: Mapping[str, Any], path: str) -> dict[str, Any]:
        before = f"{path}." if path else ""
        known = {key[len(before) :].partition(".")[0] for key in KEYS if key.startswith(before)}
        kept = {}
        for name, value in section.items():
            full = f"{before}{name}"
            if name not in known:
                warned[full] = "unknown" + meant(str(name), known)
            elif isinstance(value, Mapping) and full in SECTIONS and full.partition(".")[0] in LENIENT:
                kept[name] = known_in(value, full)
            else:
                kept[name] = value
        return kept

    return known_in(given, ""), warned


def _section(given: Mapping[str, Any], path: str, ignored: Ignored) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in given.items():
        full = f"{path}.{name}" if path else name
        entry = KEYS.get(full)
        if value == "auto" and isinstance(value, str) and (entry is None or entry.fate == "done"):
            value = AUTO.get(full)
            if value is None:
                continue
        if entry is None:
            if full in SECTIONS and value is None:
                continue
            kept[name] = _section(value, full, ignored) if full in SECTIONS and isinstance(value, Mapping) else value
            if full in SECTIONS and kept[name] == {}:
                del kept[name]
        elif entry.fate == "refused" and entry.asks(value):
            raise EngineConfigError(f"config: {full} is not supported: {entry.why}")
        elif entry.fate == "warned" and entry.asks(value):
            ignored.warned[full] = entry.why
        elif entry.words and str(value).lower() not in entry.words:
            raise EngineConfigError(f"config: {full} must be one of {', '.join(entry.words)}, not {value!r}")
        elif entry.fate in ("harmless", "warned", "refused"):
            ignored.harmless.append(full)
        else:
            kept[name] = _plain(value, full)
    return kept


def _plain(value: Any, path: str) -> Any:
    """Whole numbers as int, which some JSON has as float; values inside that are `"auto"` as in the table."""
    if isinstance(value, Mapping):
        inside = {name: _plain(item, f"{path}.{name}") for name, item in value.items()}
        return {name: item for name, item in inside.items() if item is not None or value[name] is None}
    if isinstance(value, str) and value == "auto" and path.startswith(("optimizer.params", "scheduler.params")):
        return AUTO.get(path)
    if isinstance(value, float) and path not in _FLOATS and not path.startswith(("optimizer.", "scheduler.")):
        if value.is_integer():
            return int(value)
        if path == "steps_per_print":  # Transformers passes infinity
            return None
    return value


_FLOATS = frozenset({"gradient_clipping", "fp16.loss_scale", "fp16.min_loss_scale"})


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that have another name in the engine, converted."""
    config = dict(given)
    if "bfloat16" in config:
        config.setdefault("bf16", config["bfloat16"])
        del config["bfloat16"]
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        config["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        config["zero_optimization"] = _renamed_zero(zero)
    for name in ("fp16", "bf16"):
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled", False) in (False, "auto"):
            # The rest of a disabled section is not used, and may be incomplete. Unknown keys stay, and are an error.
            unused = {key for key in section if f"{name}.{key}" in KEYS} - {"enabled", "loss_scale"}
            config[name] = {key: value for key, value in section.items() if key not in unused}
        elif isinstance(section, Mapping) and section.get("loss_scale", 0) not in (0, "auto"):
            # Nor is what a scale that adapts needs.
            config[name] = {k: v for k, v in section.items() if k not in ("loss_scale_window", "min_loss_scale")}
    if isinstance(config.get("gradient_allreduce_op"), str):
        config["gradient_allreduce_op"] = config["gradient_allreduce_op"].lower()
    if "communication_data_type" in config:
        names = {"float16": "fp16", "half": "fp16", "bfp16": "bf16", "bfloat16": "bf16", "float32": "fp32"}
        wanted = config["communication_data_type"]
        config["communication_data_type"] = names.get(wanted, wanted) if isinstance(wanted, str) else wanted
    return config


def _renamed_zero(given: Mapping[str, Any]) -> dict[str, Any]:
    zero = dict(given)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero.pop(old, False):
            zero.setdefault(new, {"device": "cpu"})
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, ...) is None:
            del zero[name]
    leaf = zero.get("leaf_module")
    if isinstance(leaf, Mapping):
        zero["leaf_module"] = {key: [value] if isinstance(value, str) else value for key, value in leaf.items()}
    if zero.get("mics_shard_size") in (-1, None):
        zero.pop("mics_shard_size", None)
    return zero
