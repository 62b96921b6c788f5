"""Plain data into settings: checks names and types, and says what would have been right."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from cldetr.config import suggest
from cldetr.errors import InputError

S = TypeVar("S")


def build_settings(cls: type[S], values: Mapping[str, Any], path: str) -> S:
    """Builds a settings dataclass from nested plain data.

    Args:
        cls: the dataclass.
        values: field name → value; nested dataclasses as mappings, None for an absent one. What a
            mapping leaves out keeps the default of that very place.
        path: what messages call this part of the configuration.
    """
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    unknown = [f"unknown key {path}.{key}{suggest(key, names)}" for key in {*values} - {*names}]
    if unknown:
        raise InputError.listing("in the configuration:", sorted(unknown))
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    built = {}
    for key, value in values.items():
        default = defaults[key]
        if dataclasses.is_dataclass(default) and isinstance(value, Mapping):
            given = dataclasses.asdict(typing.cast(Any, default))
            value = {**given, **value}
        built[key] = _convert(hints[key], value, f"{path}.{key}")
    return cls(**built)


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [arg for arg in args if arg is not type(None)]
        if len(options) == 1:
            return _convert(options[0], value, path)
        if type(value) in options:
            return value
        raise _wrong(path, hint, value)
    if origin is typing.Literal:
        if value not in args:
            raise InputError(f"{path} is one of {', '.join(map(repr, args))}, not {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong(path, hint, value)
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
        if len(kinds) != len(value):
            raise _wrong(path, hint, value)
        return tuple(
            _convert(kind, item, f"{path}[{place}]")
            for place, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _wrong(path, hint, value)
        return build_settings(typing.cast(type, hint), value, path)
    if hint is float and type(value) is int:
        return float(value)
    if hint in (bool, int, float, str) and type(value) is not hint:
        raise _wrong(path, hint, value)
    return value


def _wrong(path: str, hint: Any, value: Any) -> InputError:
    name = getattr(hint, "__name__", str(hint))
    return InputError(f"{path} takes a {name}, not {value!r}")
