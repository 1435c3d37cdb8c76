"""Chat messages, checked and brought into the plain form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from cluster.openai.errors import ApiError, bad_request
from cluster.openai.validation import shown, unknown_key

ROLES = ("system", "developer", "user", "assistant", "tool")

_TAKEN = ("role", "content", "name", "tool_calls", "tool_call_id")
_IGNORED = ("refusal", "annotations", "reasoning", "reasoning_content")
"""Parts of earlier responses that clients send back as they came."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def plain_messages(messages: Sequence[Any], template: str) -> list[dict[str, Any]]:
    """`messages` with every content a string, null and missing being empty.

    `template` is the source of the chat template. Where it knows no developer role, developer
    messages are system ones; where it knows no tool calls or no tool role, both are written
    out in the form that Hermes-style models are trained on: calls as `<tool_call>` JSON in the
    assistant's text, results as `<tool_response>` in a user's. Raises ApiError 400.
    """
    return [
        _plain_message(message, f"messages[{index}]", template)
        for index, message in enumerate(messages)
    ]


def _plain_message(message: Any, where: str, template: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_request(f"{where} must be an object, got {shown(message)}", where)
    given = {name: value for name, value in message.items() if value is not None}
    for name in given:
        if name not in _TAKEN and name not in _IGNORED:
            raise _unknown_part_of_message(where, name)
    role = given.get("role")
    if role not in ROLES:
        expected = ", ".join(ROLES)
        raise bad_request(
            f"{where}.role must be one of {expected}, got {shown(role)}", f"{where}.role"
        )
    plain: dict[str, Any] = {"role": role, "content": _text(given.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if name in given:
            plain[name] = _string(given[name], f"{where}.{name}")
    if given.get("tool_calls"):
        if role != "assistant":
            raise bad_request(f"{where}.tool_calls belong to the assistant", f"{where}.tool_calls")
        plain["tool_calls"] = _tool_calls(given["tool_calls"], f"{where}.tool_calls")
    return _adapted(plain, template)


def _unknown_part_of_message(where: str, name: str) -> ApiError:
    if name in ("audio", "function_call"):
        return bad_request(f"{where}.{name} is not supported yet", f"{where}.{name}")
    return unknown_key(f"{where}.", name, _TAKEN)


def _adapted(message: dict[str, Any], template: str) -> dict[str, Any]:
    if message["role"] == "developer" and "developer" not in template:
        message["role"] = "system"
    if message["role"] == "tool" and "tool" not in template:
        message["role"] = "user"
        message["content"] = f"<tool_response>\n{message['content']}\n</tool_response>"
    if "tool_calls" in message and "tool_calls" not in template:
        calls = [
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
            for call in message.pop("tool_calls")
        ]
        message["content"] = "\n".join(filter(None, [message["content"], *calls]))
    return message


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(
            f"{where}.content must be a string or a list of parts, got {shown(content)}",
            f"{where}.content",
        )
    return "".join(
        _part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)
    )


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise bad_request(f"{where} must be an object, got {shown(part)}", where)
    kind = part.get("type")
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise bad_request(
            f"{where}.type {shown(kind)} is not supported; only text parts are", f"{where}.type"
        )
    return _string(part.get(field), f"{where}.{field}")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls as templates take them, their arguments as an object where they are JSON."""
    if not isinstance(calls, list):
        raise bad_request(f"{where} must be a list, got {shown(calls)}", where)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise bad_request(f"{where}.function must be an object", f"{where}.function")
    name = _string(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    plain = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    if call.get("id") is not None:
        plain["id"] = _string(call["id"], f"{where}.id")
    return plain


def _parsed(arguments: str) -> Any:
    try:
        return from_json(arguments)
    except ValueError:
        # A model wrote them; what it wrote is kept as it is.
        return arguments


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{where} must be a string, got {shown(value)}", where)
    return value
