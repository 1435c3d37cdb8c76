"""Says in one line each what is wrong with a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

Schema = Mapping[str, Any]

_NOUNS = {"integer": "an integer", "number": "a number", "string": "a string", "null": "null"}


class ConfigError(Exception):
    """A configuration that must not start; `problems` holds one line for each mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def explain(error: ValidationError, model: type[BaseModel], place: str = "") -> list[str]:
    """One line for each refused value: its dotted place, what is wrong, what is allowed.

    Unknown keys are left to `known_keys`, which also says where they belong.

    Args:
        error: raised by validating something as `model`.
        place: where that something stands in its file, "" for the root.
    """
    root = model.model_json_schema()
    lines = []
    for problem in error.errors(include_url=False):
        path, schema = _resolve(root, problem["loc"])
        where = join(place, *path) or "the configuration"
        if problem["type"] == "value_error":
            allowed = "" if "properties" in schema else f"; {_allowed(schema)}"
            lines.append(f"{where}: {problem['ctx']['error']}{allowed}")
        elif problem["type"] != "extra_forbidden":
            lines.append(f"{where}: {_show(problem['input'])} is refused; {_allowed(schema)}")
    # A union reports each of its members; they say the same here.
    return list(dict.fromkeys(lines))


def join(place: str, *parts: str | int) -> str:
    """The dotted path of `parts` below `place`: join("a", "b", 0) is "a.b[0]"."""
    for part in parts:
        if isinstance(part, int):
            place += f"[{part}]"
        else:
            place += f".{part}" if place else part
    return place


def _resolve(root: Schema, loc: Iterable[str | int]) -> tuple[list[str], Schema]:
    """Follow an error's location as far as it names fields; the rest names union members."""
    schema, path = root, []
    for part in loc:
        if part not in schema.get("properties", {}):
            break
        path.append(str(part))
        schema = schema["properties"][part]
        if "$ref" in schema:
            schema = root["$defs"][schema["$ref"].rsplit("/", 1)[-1]]
    return path, schema


def _allowed(schema: Schema) -> str:
    has_default = "default" in schema and "properties" not in schema
    default = f" (default {_show(schema['default'])})" if has_default else ""
    return f"allowed: {_describe(schema)}{default}"


def _describe(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_describe(member) for member in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(map(_show, schema["enum"]))
    if "const" in schema:
        return _show(schema["const"])
    if schema.get("type") == "boolean":
        return "true or false"
    noun = _NOUNS.get(schema.get("type", ""), "a mapping")
    return noun + _range(schema)


def _range(schema: Schema) -> str:
    lower = schema.get("minimum", schema.get("exclusiveMinimum"))
    upper = schema.get("maximum")
    if "minLength" in schema:
        return " that is not empty"
    if lower is None:
        return ""
    start = f" above {lower:g}" if "exclusiveMinimum" in schema else f" from {lower:g}"
    if upper is None:
        return start if "exclusiveMinimum" in schema else f"{start} upwards"
    return f"{start} to {upper:g}" if "minimum" in schema else f"{start} and up to {upper:g}"


def _show(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
