"""`DeepSpeedConfigModel`: the base of config sections as pydantic models, which scripts derive their own from.

The sections of the engine's own config are such models, too: `section_model` makes them, and the engine checks them.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from terrazzo.deepspeed.settings import SETTINGS
from terrazzo.deepspeed.settings import setting as setting_of
from terrazzo.engine.config import EngineConfig, read_config
from terrazzo.engine.deepspeed_keys import KEYS
from terrazzo.errors import EngineConfigError

try:
    from pydantic import BaseModel, ConfigDict, create_model, model_validator
except ImportError as missing:
    raise ImportError(
        "classes of DeepSpeed's config sections need pydantic, as DeepSpeed does: install it"
    ) from missing


class DeepSpeedConfigModel(BaseModel):
    """A section of a config. Without `strict`, values that are "auto" count as missing.

    A field with `deprecated` in its `json_schema_extra` gives its value, changed by `new_param_fn`, to `new_param`.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**{k: v for k, v in data.items() if strict or v != "auto" or k == "replace_method"})
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if name in self.model_fields_set and isinstance(extra, dict) and extra.get("deprecated"):
                self._hand_over(name, extra)

    def _hand_over(self, name: str, extra: dict[str, Any]) -> None:
        *inside, last = str(extra.get("new_param", "")).split(".")
        if not last or not extra.get("set_new_param", True):
            return
        target: Any = self
        for step in inside:
            target = getattr(target, step)
        # An AssertionError, as in DeepSpeed.
        assert last not in target.model_fields_set, f"{name} is the old name of {extra['new_param']}: pass one of them"
        setattr(target, last, extra.get("new_param_fn", lambda value: value)(getattr(self, name)))


def section_model(name: str, path: str) -> type[DeepSpeedConfigModel]:
    """A model of a section of the engine's config: it has the keys and the defaults that the engine knows.

    The engine checks what is given. What it does not have is None, unless it is given.
    """
    section = getattr(EngineConfig(), path)
    beside = {key: method for key, method in _settings_of(path).items() if not hasattr(section, key)}
    keys = [key.removeprefix(f"{path}.") for key in KEYS if key.startswith(f"{path}.")]
    values: dict[str, Any] = {key.partition(".")[0]: None for key in keys}
    values |= {key: setting_of({}, method) for key, method in beside.items()}
    values |= {field: getattr(section, field) for field in section.__struct_fields__}

    def check(cls: Any, data: dict[str, Any]) -> dict[str, Any]:
        # If an attribute is set, these are all of the model's values.
        given = {key: msgspec.to_builtins(value) for key, value in data.items() if value is not values.get(key, ...)}
        try:
            checked = read_config({"train_batch_size": 1, path: given})[0]
        except EngineConfigError as error:
            raise ValueError(str(error)) from error
        read = {key: getattr(getattr(checked, path), key, None) for key in given}
        sections = {key: value for key, value in read.items() if isinstance(value, msgspec.Struct)}
        others = {key: setting_of({path: given}, method) for key, method in beside.items()}
        return {**data, **sections, **{key: value for key, value in others.items() if value != values[key]}}

    fields: dict[str, Any] = {key: (Any, value) for key, value in values.items()}
    validators: dict[str, Any] = {"check": model_validator(mode="before")(cast(Any, classmethod(check)))}
    return create_model(name, __base__=DeepSpeedConfigModel, __validators__=validators, **fields)


def _settings_of(path: str) -> dict[str, str]:
    """The keys of a section of which a method of DeepSpeed's engine returns the value, and its name.

    >>> _settings_of("zero_optimization")["prefetch_bucket_size"]
    'zero_prefetch_bucket_size'
    """
    return {
        key.removeprefix(f"{path}.").removeprefix("stage3_"): method
        for method, (key, _) in SETTINGS.items()
        if key.startswith(f"{path}.")
    }


__all__ = ["DeepSpeedConfigModel", "section_model"]
