"""A validator for the part of JSON Schema that the schemas of tests use. Unknown keywords are errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

KEYWORDS = {
    *("type", "enum", "pattern", "minimum", "maximum", "maxLength", "minItems", "maxItems"),
    *("properties", "required", "additionalProperties", "items", "anyOf", "x-kubernetes-int-or-string"),
}
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
}


def problems(value: Any, schema: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yield a sentence for each part of the value that breaks the schema."""
    assert set(schema) <= KEYWORDS, f"the validator does not know {set(schema) - KEYWORDS}"
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (kind == "integer" and isinstance(value, bool))):
        yield f"{where} is not of the type {kind}: {value!r}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r}, not one of {schema['enum']}"
    if "anyOf" in schema and all(any(problems(value, each, where)) for each in schema["anyOf"]):
        yield f"{where} fits no alternative: {value!r}"
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{where} is {value!r}, which does not match {schema['pattern']}"
        if len(value) > schema.get("maxLength", len(value)):
            yield f"{where} is too long"
    elif isinstance(value, int):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            yield f"{where} is out of range: {value}"
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{where} has {len(value)} items"
        for index, item in enumerate(value):
            yield from problems(item, schema.get("items", {}), f"{where}[{index}]")
    elif isinstance(value, dict):
        yield from _problems_of_object(value, schema, where)


def _problems_of_object(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where} has no {name}"
    for name, part in value.items():
        if name in known:
            yield from problems(part, known[name], f"{where}.{name}")
        elif isinstance(others, dict):
            yield from problems(part, others, f"{where}.{name}")
        elif not others:
            yield f"{where} has an unknown field {name}"
