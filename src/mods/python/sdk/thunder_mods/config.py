"""Configuration of a mod: declared fields, defaults, and the JSON schema for the validation of requests."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import types
from collections import abc
from typing import Any, ClassVar, Dict, List, Literal, Mapping, NamedTuple, Optional, Union, get_args, get_origin, get_type_hints

Schema = Dict[str, Any]

_TYPE_NAMES: Dict[Any, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_ARRAYS = (list, tuple, set, frozenset, abc.Sequence, abc.Iterable, abc.Set, abc.Collection)
_OBJECTS = (dict, abc.Mapping, abc.MutableMapping)
#: `int | str` has its own type since Python 3.10.
_UNIONS = (Union, getattr(types, "UnionType", Union))


class DeclaredConfig(NamedTuple):
    """Declarations of `@mod(config=…)`."""

    defaults: Dict[str, Any]
    schema: Schema


def parse_config(config: Union[None, Mapping[str, Any], type]) -> Optional[DeclaredConfig]:
    """Returns the fields of a class with annotations or of a dictionary of defaults; None for None."""
    if config is None:
        return None
    if isinstance(config, type) and not _is_mapping(config):
        schema = _class_schema(config)
        defaults = {name: field["default"] for name, field in schema["properties"].items() if "default" in field}
    elif isinstance(config, abc.Mapping):
        defaults = dict(config)
        schema = _object({name: dict(_default_schema(value), default=value) for name, value in defaults.items()}, [])
    else:
        raise TypeError("config must be a class with annotations or a dictionary of defaults, got %r" % (config,))
    try:
        json.dumps(defaults)
    except (TypeError, ValueError) as error:
        raise TypeError("the defaults of a configuration must be JSON: %s" % error) from None
    return DeclaredConfig(defaults, schema)


def fill_defaults(config: Optional[Mapping[str, Any]], defaults: Optional[Mapping[str, Any]], schema: Optional[Schema]) -> Dict[str, Any]:
    """Returns the configuration of one run: the given fields, and copies of the defaults of missing fields, also in nested
    objects."""
    filled = dict(copy.deepcopy(dict(defaults or {})), **(config or {}))
    return filled if schema is None else _filled(filled, schema)  # type: ignore[no-any-return]


def _filled(value: Any, schema: Schema) -> Any:
    """Returns a valid value with the defaults of its missing fields. Integers such as 3.0, which JSON schema accepts, become ints."""
    schema = next((form for form in schema.get("anyOf", ()) if _fits(value, form)), schema)
    if isinstance(value, dict):
        properties: Dict[str, Schema] = schema.get("properties", {})
        values = schema.get("additionalProperties")
        others: Schema = values if isinstance(values, dict) else {}
        filled = {name: _filled(item, properties.get(name, others)) for name, item in value.items()}
        for name, field in properties.items():
            if name not in filled and "default" in field:
                filled[name] = _filled(copy.deepcopy(field["default"]), field)
        return filled
    if isinstance(value, list) and ("items" in schema or "prefixItems" in schema):
        return [_filled(item, form) for item, form in zip(value, _item_schemas(value, schema))]
    if isinstance(value, float) and value.is_integer():
        kind = schema.get("type")
        kinds = kind if isinstance(kind, list) else [kind]
        return int(value) if "integer" in kinds and "number" not in kinds else value
    return value


def _fits(value: Any, schema: Schema) -> bool:
    """Returns True if a valid value of a union may have this form of the union."""
    if "anyOf" in schema:
        return any(_fits(value, form) for form in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if isinstance(value, dict):
        properties: Dict[str, Schema] = schema.get("properties", {})
        others = schema.get("additionalProperties", {})
        return (
            (kind is None or "object" in kinds)
            and all(name in value for name in schema.get("required", ()))
            and all(name in properties or others is not False for name in value)
            and all(_fits(item, properties.get(name, others or {})) for name, item in value.items())
        )
    if isinstance(value, list):
        is_list = kind is None or "array" in kinds
        return is_list and all(_fits(item, form) for item, form in zip(value, _item_schemas(value, schema)))
    return kind is None or any(name not in ("object", "array") for name in kinds)


def _item_schemas(value: List[Any], schema: Schema) -> List[Schema]:
    """Returns the schema of each item of a list."""
    forms: List[Schema] = schema.get("prefixItems", [])[: len(value)]
    return forms + [schema.get("items", {})] * (len(value) - len(forms))


def _is_mapping(config: type) -> bool:
    return issubclass(config, abc.Mapping) and not hasattr(config, "__required_keys__")


def _object(properties: Dict[str, Schema], required: List[str]) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = required
    return schema


def _default_schema(value: Any) -> Schema:
    """Returns the schema for values that replace a default: a string for a string, any number for a number, and so on."""
    if value is None:
        return {}
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, (int, float)):
        return {"type": "number"}
    if isinstance(value, str):
        return {"type": "string"}
    return {"type": "object" if isinstance(value, abc.Mapping) else "array"}


def _class_schema(cls: type) -> Schema:
    """Returns the schema of a dataclass, TypedDict, NamedTuple or other class with annotations."""
    try:
        annotations = get_type_hints(cls, include_extras=True)
    except Exception as error:  # an annotation runs code of the mod
        raise TypeError("the annotations of %s cannot be read: %s" % (cls.__name__, error)) from None
    if not annotations:
        raise TypeError("%s declares no annotations: write `name: type` or `name: type = default` for each field" % cls.__name__)
    keys = getattr(cls, "__required_keys__", None)
    properties: Dict[str, Schema] = {}
    required: List[str] = []
    for name, annotation in annotations.items():
        if annotation is ClassVar or get_origin(annotation) is ClassVar:
            continue
        default = _default(cls, name)
        if not default and (keys is None or name in keys):
            required.append(name)
        properties[name] = dict(_annotation_schema(annotation, "%s.%s" % (cls.__name__, name)), **default)
    return _object(properties, required)


def _default(cls: type, name: str) -> Schema:
    """Returns {"default": value} of a field; {} without a default."""
    if dataclasses.is_dataclass(cls):
        field = next(field for field in dataclasses.fields(cls) if field.name == name)
        if field.default_factory is not dataclasses.MISSING:
            return {"default": _plain(field.default_factory())}
        return {} if field.default is dataclasses.MISSING else {"default": _plain(field.default)}
    named = getattr(cls, "_field_defaults", None)
    sources = [vars(base) for base in cls.__mro__ if base is not object] if named is None else [named]
    return next(({"default": _plain(source[name])} for source in sources if name in source), {})


def _plain(value: Any) -> Any:
    """Converts a default to JSON types."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, (tuple, set, frozenset)) else value


def _annotation_schema(annotation: Any, path: str) -> Schema:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        described = [note for note in annotation.__metadata__ if isinstance(note, str)]
        schema = _annotation_schema(annotation.__origin__, path)
        return dict(schema, description=described[0]) if described else schema
    if annotation is Any or annotation is object:
        return {}
    if annotation in (None, type(None)):
        return {"type": "null"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in _UNIONS:
        forms = [_annotation_schema(argument, path) for argument in arguments]
        types_only = all(list(form) == ["type"] for form in forms)
        return {"type": [form["type"] for form in forms]} if types_only else {"anyOf": forms}
    name = getattr(origin, "__name__", None) or str(origin)
    if name in ("Required", "NotRequired", "ReadOnly"):
        return _annotation_schema(arguments[0], path)
    kind = origin or annotation
    if kind in _TYPE_NAMES:
        return {"type": _TYPE_NAMES[kind]}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if kind in _ARRAYS:
        return _items_schema(kind, arguments, path)
    if kind in _OBJECTS:
        values = _annotation_schema(arguments[1], path) if len(arguments) == 2 else {}
        return {"type": "object", "additionalProperties": values} if values else {"type": "object"}
    if isinstance(kind, type) and getattr(kind, "__annotations__", None):
        return _class_schema(kind)
    raise TypeError(
        "%s: unsupported annotation %s; supported are str, int, float, bool, None, Any, Literal, Optional, "
        "Union, Annotated, enumerations, lists, dictionaries, and classes with such annotations" % (path, annotation)
    )


def _items_schema(kind: Any, arguments: Any, path: str) -> Schema:
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        items = [_annotation_schema(argument, path) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    items = _annotation_schema(arguments[0], path) if arguments else {}
    return {"type": "array", "items": items} if items else {"type": "array"}
