"""What is wrong with a request is said with its name, its value and what would be right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.openai.service import Limits
from cluster.tokenizer import Tokenizer
from tests.cluster.openai.fake_backend import FakeBackend, always
from tests.cluster.openai.harness import VOCAB, Front, make_service

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
HUGE = 10**400


@pytest.fixture(scope="module")
def front(tokenizer: Tokenizer) -> Front:
    return Front(make_service(tokenizer, FakeBackend(always([28] * 3))))


SHARED: list[tuple[str, Any, str]] = [
    ("temperature", 2.01, "temperature must be a number from 0 to 2, got 2.01"),
    ("temperature", -1, "from 0 to 2"),
    ("temperature", float("nan"), "got NaN"),
    ("temperature", "0.5", 'temperature must be a number from 0 to 2, got "0.5"'),
    ("temperature", True, "got true"),
    ("temperature", HUGE, "from 0 to 2"),
    ("top_p", 0, "top_p must be a number above 0 and at most 1, got 0"),
    ("top_p", 1.01, "above 0 and at most 1"),
    ("top_k", -2, "top_k must be an integer of at least -1, got -2"),
    ("top_k", 1.5, "an integer"),
    ("min_p", 1.5, "from 0 to 1"),
    ("repetition_penalty", 0, "from 0.01 to 100"),
    ("presence_penalty", 2.5, "from -2 to 2"),
    ("frequency_penalty", float("inf"), "got Infinity"),
    ("n", 0, "n must be an integer from 1 to 128, got 0"),
    ("n", 129, "from 1 to 128"),
    ("n", True, "got true"),
    ("max_tokens", 0, "max_tokens must be an integer of at least 1, got 0"),
    ("max_tokens", "10", 'got "10"'),
    ("max_tokens", 2048, "max_tokens is 2048 and the prompt has"),
    ("max_completion_tokens", 0, "of at least 1"),
    ("min_tokens", -1, "of at least 0"),
    ("seed", 2**63, "from -9223372036854775808 to 9223372036854775807"),
    ("seed", 1.0, "an integer"),
    ("stop", ["x"] * 17, "at most 16 items"),
    ("stop", "", "stop[0] must be a string of 1 to 256 characters"),
    ("stop", ["a", 5], "stop[1] must be a string of 1 to 256 characters, got 5"),
    ("stop", "x" * 257, "1 to 256 characters"),
    ("stop", 5, "stop must be a string or a list of strings"),
    ("stop_token_ids", [VOCAB], f"stop_token_ids[0] must be a token id from 0 to {VOCAB - 1}"),
    ("stop_token_ids", [1, "2"], 'stop_token_ids[1] must be an integer, got "2"'),
    ("allowed_token_ids", [3, -1], "allowed_token_ids[1] must be a token id from 0"),
    ("allowed_token_ids", [], "allowed_token_ids must not be empty"),
    ("logit_bias", {str(VOCAB): 1}, f"logit_bias keys must be token ids from 0 to {VOCAB - 1}"),
    ("logit_bias", {"-1": 1}, 'got "-1"'),
    ("logit_bias", {"999999999999": 1}, 'got "999999999999"'),
    ("logit_bias", {"9" * 5000: 1}, "logit_bias keys must be token ids"),
    ("logit_bias", {"AI": 1}, 'got "AI"'),
    ("logit_bias", {"٣": 1}, "logit_bias keys must be token ids"),
    ("logit_bias", {"5": float("nan")}, 'logit_bias["5"] must be a number from -100 to 100'),
    ("logit_bias", {"5": "x"}, 'got "x"'),
    ("logit_bias", {"5": 1000}, "got 1000"),
    ("logit_bias", {"5": True}, "got true"),
    ("logit_bias", {"5": None}, "got null"),
    ("logit_bias", {"5": HUGE}, "must be a number from -100 to 100"),
    ("logit_bias", [5], "logit_bias must be an object"),
    ("prompt_logprobs", 21, "from 0 to 20"),
    ("truncate_prompt_tokens", -2, "of at least -1"),
    ("priority", 2**31, "priority must be an integer from"),
    ("timeout_s", 0, "timeout_s must be a number above 0, got 0"),
    ("timeout_s", -0.5, "timeout_s must be a number above 0, got -0.5"),
    ("timeout_s", float("inf"), "timeout_s must be a number above 0, got Infinity"),
    ("timeout_s", float("nan"), "timeout_s must be a number above 0, got NaN"),
    ("timeout_s", HUGE, "timeout_s must be a number above 0"),
    ("timeout_s", "30", 'timeout_s must be a number above 0, got "30"'),
    ("timeout_s", True, "got true"),
    ("cache_salt", "x" * 257, "at most 256 characters"),
    ("request_id", "a b", "visible ASCII"),
    ("stream", "yes", "stream must be true or false"),
    ("stream", 1, "stream must be true or false"),
    ("echo_", True, "unknown parameter"),
    ("temprature", 1, "unknown parameter 'temprature'; did you mean 'temperature'?"),
    ("maxtokens", 1, "did you mean 'max_tokens'?"),
    ("stream_options", {}, "stream_options needs stream to be true"),
    ("response_format", {"type": "json_object"}, "response_format is not supported yet"),
    ("tools", [{"type": "function"}], "tools is not supported yet"),
    ("tool_choice", "auto", "tool_choice is not supported yet"),
    ("best_of", 3, "best_of is not supported yet"),
    ("bad_words", ["x"], "bad_words is not supported yet"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("name", "value", "message"), SHARED)
def test_bad_value(front: Front, path: str, name: str, value: Any, message: str) -> None:
    prompt = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": MESSAGES}
    error = front.refusal(path, {**prompt, name: value})
    assert message in error["message"]
    assert str(error["param"]).startswith(name)
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "prompt is required"),
        ({"prompt": None}, "prompt", "prompt is required"),
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": [[]]}, "prompt", "must not be empty"),
        ({"prompt": ["Hi", ""]}, "prompt[1]", "prompt[1] must not be empty"),
        ({"prompt": 5}, "prompt", "prompt must be a string, a list of strings"),
        ({"prompt": [1, "a"]}, "prompt", "prompt[1] must be an integer, as in a list of token"),
        ({"prompt": [1, True]}, "prompt", "got true"),
        ({"prompt": [1.0]}, "prompt[0]", "prompt[0] must be a string or a list of token ids"),
        ({"prompt": [[1], "a", [True]]}, "prompt[2]", "prompt[2][0] must be an integer"),
        ({"prompt": [VOCAB]}, "prompt", f"prompt[0] must be a token id from 0 to {VOCAB - 1}"),
        ({"prompt": [5, -1]}, "prompt", "prompt[1] must be a token id from 0"),
        ({"prompt": [[5], [10**30]]}, "prompt[1]", "prompt[1][0] must be a token id"),
        ({"prompt": [5] * 2048}, "prompt", "has 2048 tokens; at most 2047 fit into the context"),
        ({"prompt": "a " * 3000}, "prompt", "tokens; at most 2047 fit"),
        ({"prompt": "a" * 500_000}, "prompt", "prompt has 500000 characters"),
        ({"prompt": "a " * 50_000}, "prompt", "prompt has more than"),
        ({"prompt": ["a"] * 9}, "prompt", "prompt has 9 prompts; at most 8 go in one request"),
        ({"prompt": ["a"] * 8, "n": 3}, "n", "3 x 8 = 24; at most 20 choices"),
        ({"prompt": [5] * 2040, "max_tokens": 9}, "max_tokens", "9 + 2040 = 2049 in all"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "from 0 to 20, got 21"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "got true"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "suffix is not supported yet"),
        ({"prompt": "a", "max_tokens": 5, "min_tokens": 6}, "min_tokens", "at most max_tokens"),
        (
            {"prompt": "a", "max_tokens": 5, "max_completion_tokens": 6},
            "max_tokens",
            "must not differ",
        ),
        (
            {"prompt": "a", "stream": True, "stream_options": {"include_use": True}},
            "stream_options.include_use",
            "unknown parameter 'stream_options.include_use'; did you mean 'include_usage'?",
        ),
        (
            {"prompt": "a", "stream": True, "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
            "must be true or false",
        ),
        ({"prompt": "a", "stream": True, "stream_options": 5}, "stream_options", "an object"),
    ],
)
def test_bad_completion(
    tokenizer: Tokenizer, body: dict[str, Any], param: str, message: str
) -> None:
    limits = Limits(max_prompts=8, max_choices=20)
    backend = FakeBackend(always([28]))
    front = Front(make_service(tokenizer, backend, limits=limits))
    error = front.refusal(COMPLETIONS, body)
    assert message in error["message"]
    assert error["param"] == param
    assert not backend.requests


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "messages", "messages is required"),
        ({"messages": []}, "messages", "of at least 1 items"),
        ({"messages": "Hi"}, "messages", "messages must be a list"),
        ({"messages": ["Hi"]}, "messages[0]", "messages[0] must be an object"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "got null"),
        (
            {"messages": [{"role": "robot", "content": "Hi"}]},
            "messages[0].role",
            'must be one of system, developer, user, assistant, tool, got "robot"',
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got 5"),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[1].content[0].type",
            '"image_url" is not supported; only text parts are',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "must be a string",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "an object"),
        (
            {"messages": [{"role": "user", "contents": "x"}]},
            "messages[0].contents",
            "unknown parameter 'messages[0].contents'; did you mean 'content'?",
        ),
        ({"messages": MESSAGES * 2049}, "messages", "has 2049 messages"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"messages": MESSAGES, "logprobs": 2}, "logprobs", "true or false"),
        (
            {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "from 0 to 20",
        ),
        ({"messages": MESSAGES, "audio": {"voice": "x"}}, "audio", "not supported yet"),
        ({"messages": MESSAGES, "modalities": ["audio"]}, "modalities", "not supported yet"),
        ({"messages": MESSAGES, "echo": True}, "echo", "unknown parameter 'echo'"),
    ],
)
def test_bad_chat(front: Front, body: dict[str, Any], param: str, message: str) -> None:
    error = front.refusal(CHAT, body)
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b'"Hi"',
        b"null",
        b"[" * 100_000,
        b'{"prompt": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_bad_json(front: Front, content: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        message = front.refusal(path, content)["message"]
        assert "JSON" in message
        assert len(message) < 400


def test_values_that_stand_for_the_default(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(always([28]))
    front = Front(make_service(tokenizer, backend))
    nothing: dict[str, Any] = dict.fromkeys(name for name, _, _ in SHARED if name != "echo_")
    for unknown in ("temprature", "maxtokens"):
        del nothing[unknown]
    front.complete(prompt="Hi", seed=7)
    front.complete(prompt="Hi", **{**nothing, "seed": 7})
    front.complete(
        prompt="Hi",
        seed=7,
        logit_bias={},
        stop=[],
        top_k=-1,
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
        best_of=1,
        suffix="",
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        safety_identifier="x",
        prompt_cache_key="y",
    )
    front.complete(prompt="Hi", seed=7, top_k=10_000_000)
    first, *others = [request.sampling for request in backend.requests]
    assert others == [first] * 3


def test_every_parameter_reaches_the_engine(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(always([28]))
    front = Front(make_service(tokenizer, backend))
    front.complete(
        prompt=[5, 6, 7],
        n=2,
        max_tokens=9,
        min_tokens=1,
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=1,
        logit_bias={"28": -100, "29": 2.5},
        allowed_token_ids=[28, 29, 28],
        stop_token_ids=[30],
        ignore_eos=False,
        seed=-1,
        logprobs=3,
        prompt_logprobs=5,
        truncate_prompt_tokens=2,
        priority=-3,
        cache_salt="salt",
        request_id="mine",
    )
    (request,) = backend.requests
    assert request.request_id.startswith("cmpl-mine-")
    assert (request.prompt_token_ids, request.n) == ((6, 7), 2)
    assert (request.priority, request.cache_salt) == (-3, "salt")
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (9, 1, 2**64 - 1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 40)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 1)
    assert sampling.logit_bias == ((28, -100), (29, 2.5))
    assert (sampling.allowed_token_ids, sampling.stop_token_ids) == ((28, 29), (30,))
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, 5)


def test_seeds_are_drawn_where_none_came(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(always([28]))
    front = Front(make_service(tokenizer, backend))
    front.complete(prompt=["a", "b", "c"])
    front.complete(prompt=["a", "b", "c"], seed=3)
    seeds = [request.sampling.seed for request in backend.requests]
    assert len(set(seeds[:3])) == 3
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seeds[3:] == [3] * 3


def test_max_tokens_defaults(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(always([28]))
    front = Front(make_service(tokenizer, backend))
    front.complete(prompt=[5] * 10)
    front.complete(prompt=[5] * 2040)
    front.chat(messages=MESSAGES)
    front.chat(messages=MESSAGES, max_completion_tokens=5)
    front.complete(prompt=[5] * 5000, truncate_prompt_tokens=-1, max_tokens=48)
    limits = [request.sampling.max_tokens for request in backend.requests]
    chat_prompt = len(backend.requests[2].prompt_token_ids)
    assert limits == [16, 8, 2048 - chat_prompt, 5, 48]
    assert len(backend.requests[-1].prompt_token_ids) == 2000


def test_prompt_that_no_pool_can_hold(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(always([28]))
    front = Front(make_service(tokenizer, backend, kv_pool_tokens=512))
    error = front.refusal(COMPLETIONS, {"prompt": [5] * 512})
    assert "512 tokens and needs KV for 513; the whole KV pool holds 512" in error["message"]
    assert error["code"] == "context_length_exceeded"
    front.complete(prompt=[5] * 511, max_tokens=100)
    assert len(backend.requests) == 1


def test_unknown_model(front: Front) -> None:
    for path, extra in (
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": MESSAGES}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ):
        response = front.request("POST", path, json={"model": "gpt-4", **extra})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_body_limit(tokenizer: Tokenizer) -> None:
    limits = Limits(max_body_bytes=1000)
    front = Front(make_service(tokenizer, FakeBackend(always([28])), limits=limits))
    body = json.dumps({"prompt": "a" * 2000}).encode()

    async def unannounced() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    for path in (COMPLETIONS, CHAT, "/tokenize"):
        for content in (body, unannounced()):
            response = front.request("POST", path, content=content)
            assert response.status_code == 413
            assert "1000 bytes" in response.json()["error"]["message"]
