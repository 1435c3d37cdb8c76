"""From a request's bytes to a body, or to an error that says what to change."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, from_json

from cluster.openai.errors import ApiError, bad_request
from cluster.openai.limits import MAX_STOP_CHARS
from cluster.openai.schema import Body

AnyBody = TypeVar("AnyBody", bound=Body)

_SHOWN_CHARS = 80
_KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def parse_body(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    """The body of one request. Raises ApiError 400."""
    try:
        # Bounds the depth of nesting, and refuses lone surrogates, which no tokenizer takes.
        data = from_json(raw)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise bad_request("the body must be a JSON object")
    return _validate(data, kind, "")


def shown(value: object) -> str:
    """A client's value as JSON, cut to a length that suits a message."""
    if isinstance(value, list | dict) and len(value) > _SHOWN_CHARS:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = json.dumps(value[:_SHOWN_CHARS] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def unknown_key(where: str, key: str, known: Iterable[str]) -> ApiError:
    """400 for a key that nobody knows; names the nearest one that is known."""
    key = key[:_SHOWN_CHARS]
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return bad_request(f"unknown parameter {where + key!r}{hint}", where + key, "unknown_parameter")


def _validate(data: Mapping[str, Any], kind: type[AnyBody], where: str) -> AnyBody:
    """`where`: the path to `data` from the body, ending in a dot unless empty."""
    given = {name: value for name, value in data.items() if value is not None}
    _refuse_unknown(given, kind, where)
    fields = {}
    for name, field in kind.model_fields.items():
        if name in given:
            inner = _plain_type(field.annotation)
            nested = isinstance(given[name], dict) and issubclass(inner, Body)
            fields[name] = _validate(given[name], inner, f"{name}.") if nested else given[name]
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise _explain(details[0], kind.model_fields, where) from error


def _refuse_unknown(given: Mapping[str, Any], kind: type[Body], where: str) -> None:
    for name, value in given.items():
        if name in kind.unsupported:
            if not any(value == neutral for neutral in kind.unsupported[name]):
                raise bad_request(f"{name} is not supported yet", name, "unsupported_parameter")
        elif name not in kind.model_fields and name not in kind.no_ops:
            raise unknown_key(where, name, [*kind.model_fields, *kind.no_ops, *kind.unsupported])


def _explain(error: ErrorDetails, fields: Mapping[str, FieldInfo], where: str) -> ApiError:
    name, *path = error["loc"]
    param = where + str(name) + "".join(f"[{part}]" for part in path)
    if error["type"] == "missing":
        return bad_request(f"{param} is required", param)
    expected = _expected_item(error) if path else _expected(fields[str(name)])
    return bad_request(f"{param} must be {expected}, got {shown(error['input'])}", param)


def _expected(field: FieldInfo) -> str:
    """The type and range of a field, in words."""
    kind = _plain_type(field.annotation)
    words = field.description or _KINDS.get(kind, "an object")
    unit = "characters" if kind is str else "items"
    return " ".join([words, *_bounds(field.metadata, unit)])


def _expected_item(error: ErrorDetails) -> str:
    """The same for an item of a list of stop strings or token ids."""
    if error["type"].startswith("string"):
        return f"a string of 1 to {MAX_STOP_CHARS} characters"
    return "an integer"


def _plain_type(annotation: Any) -> type:
    """`int` of `int | None`, `list` of `list[int]`."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    origin = get_origin(annotation) or annotation
    return origin if isinstance(origin, type) else object


def _bounds(metadata: Iterable[Any], unit: str) -> Iterator[str]:
    """ "from 0 to 2", "above 0 and at most 1", "of at most 16 items" ..."""
    limits: dict[type, Any] = {}
    for item in metadata:
        match item:
            case Ge(bound) | Gt(bound) | Le(bound) | MinLen(bound) | MaxLen(bound):
                limits[type(item)] = bound
    if Ge in limits and Le in limits:
        yield f"from {limits[Ge]} to {limits[Le]}"
    elif Ge in limits:
        yield f"of at least {limits[Ge]}"
    elif Gt in limits:
        yield f"above {limits[Gt]}" + (f" and at most {limits[Le]}" if Le in limits else "")
    if MinLen in limits and MaxLen in limits:
        yield f"of {limits[MinLen]} to {limits[MaxLen]} {unit}"
    elif MaxLen in limits:
        yield f"of at most {limits[MaxLen]} {unit}"
    elif MinLen in limits:
        yield f"of at least {limits[MinLen]} {unit}"
