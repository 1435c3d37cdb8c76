"""Messages become the prompt that the template makes of them, and nothing else."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.openai.messages import plain_messages
from cluster.tokenizer import ChatTemplateError, Tokenizer
from replicas.models.sources import resolve
from tests.cluster.openai.fake_backend import FakeBackend, always
from tests.cluster.openai.harness import Front, make_service

CHAT = "/v1/chat/completions"
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": "Hi"}
NATIVE = "{{ message.tool_calls }} {{ tool }} developer"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(always([28]))


@pytest.fixture
def front(tokenizer: Tokenizer, backend: FakeBackend) -> Front:
    return Front(make_service(tokenizer, backend))


@functools.cache
def embedded() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(resolve("embedded")))


def with_template(template: str | None) -> Tokenizer:
    fast = copy.copy(embedded())
    fast.chat_template = template
    return Tokenizer(fast)


def rendered(front: Front, messages: list[Any], **extra: Any) -> str:
    """The prompt that chat sends to the engine; /tokenize must tell the same."""
    front.chat(messages=messages, max_tokens=1, **extra)
    backend = front.service.backend
    assert isinstance(backend, FakeBackend)
    ids = list(backend.requests[-1].prompt_token_ids)
    response = front.request("POST", "/tokenize", json={"messages": messages, **extra})
    assert response.json()["tokens"] == ids
    return front.service.tokenizer.decode(ids)


def test_prompt(front: Front) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert rendered(front, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "empty", [{"content": None}, {}, {"content": ""}, {"content": []}], ids=str
)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_null_missing_and_empty_content_are_one(
    front: Front, role: str, empty: dict[str, Any]
) -> None:
    text = rendered(front, [USER, {"role": role, **empty}, USER])
    assert f"<|im_start|>{role}\n<|im_end|>" in text
    assert "None" not in text


def test_tool_calls_without_content(front: Front) -> None:
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL], "refusal": None},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        USER,
    ]
    text = rendered(front, history)
    assert "None" not in text
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}\n{call}<|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>" in text


def test_text_parts_are_joined_in_order(front: Front) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert rendered(front, [{"role": "user", "content": parts}]) == rendered(
        front, [{"role": "user", "content": "Hello"}]
    )


def test_a_response_of_ours_or_openais_can_be_sent_back(front: Front) -> None:
    answer = front.chat(messages=[USER], max_tokens=1)["choices"][0]["message"]
    nulls = dict.fromkeys(["audio", "function_call", "tool_calls", "name", "reasoning_content"])
    text = rendered(front, [USER, {**answer, **nulls, "annotations": []}, USER])
    assert text == rendered(front, [USER, {"role": "assistant", "content": ","}, USER])


def test_developer_is_system_for_a_template_that_lacks_it(front: Front) -> None:
    text = rendered(front, [{"role": "developer", "content": "Be brief."}, USER])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_a_template_that_knows_tools_gets_them_as_they_are() -> None:
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "call_1"},
    ]
    before = copy.deepcopy(messages)
    assert plain_messages(messages, NATIVE) == [
        {"role": "developer", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": 1}},
                }
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    ]
    assert messages == before


@pytest.mark.parametrize("arguments", ["not json", '"\\ud800"', "[" * 500, "{}", "", None])
def test_tool_arguments_of_any_kind_render(front: Front, arguments: str | None) -> None:
    call = {"function": {"name": "add", "arguments": arguments}}
    text = rendered(front, [USER, {"role": "assistant", "tool_calls": [call]}])
    assert "None" not in text
    assert '{"name": "add", "arguments": ' in text


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("x", "messages[0].tool_calls"),
        (["x"], "messages[0].tool_calls[0].function"),
        ([{"function": {}}], "messages[0].tool_calls[0].function.name"),
        ([{**CALL, "id": 5}], "messages[0].tool_calls[0].id"),
    ],
)
def test_bad_tool_calls(front: Front, calls: Any, param: str) -> None:
    body = {"messages": [{"role": "assistant", "tool_calls": calls}]}
    assert front.refusal(CHAT, body)["param"] == param


def test_tool_calls_are_the_assistants(front: Front) -> None:
    body = {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}
    assert front.refusal(CHAT, body)["param"] == "messages[0].tool_calls"


def test_generation_prompt_and_continuation(front: Front) -> None:
    assert rendered(front, [USER], add_generation_prompt=False).endswith("Hi<|im_end|>\n")
    answer = {"role": "assistant", "content": "Once upon"}
    text = rendered(front, [USER, answer], continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    body = {
        "messages": [USER, answer],
        "continue_final_message": True,
        "add_generation_prompt": True,
    }
    assert "exclude each other" in front.refusal(CHAT, body)["message"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 + 'a' }}", "cannot be rendered"),
    ],
)
def test_a_template_that_refuses_is_400(
    backend: FakeBackend, template: str | None, message: str
) -> None:
    front = Front(make_service(with_template(template), backend))
    error = front.refusal(CHAT, {"messages": [USER]})
    assert message in error["message"]
    assert error["param"] == "messages"


def test_render_raises_its_own_error() -> None:
    tokenizer = with_template(None)
    with pytest.raises(ChatTemplateError):
        tokenizer.render_chat([USER], add_generation_prompt=True, continue_final_message=False)


def test_prompt_too_long(front: Front) -> None:
    for content in ("a " * 3000, "a" * 500_000):
        error = front.refusal(CHAT, {"messages": [{"role": "user", "content": content}]})
        assert error["code"] == "context_length_exceeded"
        assert "2048 tokens" in error["message"]
