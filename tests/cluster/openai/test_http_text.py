"""Text, finish reasons, usage and logprobs: a stream tells what a whole response tells."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.tokenizer import Tokenizer
from replicas.protocol import GenerateRequest
from tests.cluster.openai.fake_backend import FakeBackend, Script, always
from tests.cluster.openai.harness import (
    Front,
    RawClient,
    events,
    join_chat,
    join_completion,
    make_service,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
CHILLI = "\U0001f336\ufe0f"
TEXT = f"The quick brown fox, crème brûlée {CHILLI}{CHILLI} and 火の車."


def front_of(tokenizer: Tokenizer, script: Script, **options: Any) -> Front:
    return Front(make_service(tokenizer, FakeBackend(script, **options)))


def saying(tokenizer: Tokenizer, *texts: str) -> Script:
    """Choice i of prompt j says texts[i]; special tokens in a text are such tokens."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return lambda request, choice: ids[choice % len(ids)]


def both(front: Front, path: str, body: dict[str, Any]) -> tuple[dict[int, Any], dict[str, Any]]:
    """Choices by index and usage, after checking that stream and whole response agree."""
    whole = front.complete(**body) if path == COMPLETIONS else front.chat(**body)
    chunks = front.stream(path, **body, stream_options={"include_usage": True})
    joined = join_completion(chunks) if path == COMPLETIONS else join_chat(chunks)
    plain = {}
    for choice in whole["choices"]:
        logprobs = choice["logprobs"]
        if path == CHAT:
            assert choice["message"]["role"] == "assistant"
            text, logprobs = choice["message"]["content"], logprobs and logprobs["content"]
        else:
            text = choice["text"]
        plain[choice["index"]] = {
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice["finish_reason"],
        }
    assert list(plain) == sorted(plain) == list(range(len(plain)))
    assert joined == plain
    assert chunks[-1]["usage"] == whole["usage"]
    return plain, whole["usage"]


@settings(max_examples=25)
@given(
    text=st.text(max_size=40),
    stops=st.lists(st.text(min_size=1, max_size=3), max_size=3),
    echo=st.booleans(),
    logprobs=st.sampled_from([None, 0, 3]),
    stride=st.integers(1, 4),
    n=st.integers(1, 3),
    late=st.booleans(),
    cut=st.integers(1, 30),
)
def test_stream_equals_whole_for_completions(
    tokenizer: Tokenizer,
    text: str,
    stops: list[str],
    echo: bool,
    logprobs: int | None,
    stride: int,
    n: int,
    late: bool,
    cut: int,
) -> None:
    # Half of the text is the prompt and may end anywhere, inside a character too.
    ids = tokenizer.encode(TEXT + text, add_special_tokens=False)
    front = front_of(tokenizer, lambda r, c: ids[cut + c :], stride=stride, choice_0_late=late)
    body = {"prompt": [ids[:cut], ids[: cut + 1]], "echo": echo, "logprobs": logprobs, "n": n}
    choices, _ = both(front, COMPLETIONS, {**body, "stop": stops, "max_tokens": 40})
    assert len(choices) == 2 * n
    for choice in choices.values():
        if logprobs is not None:
            check_legacy(choice["text"], choice["logprobs"], echo)
        if stops and choice["finish_reason"] == "stop" and not echo:
            assert not any(stop in choice["text"] for stop in stops)


def check_legacy(text: str, logprobs: dict[str, list[Any]], echo: bool) -> None:
    tokens = logprobs["tokens"]
    assert {len(values) for values in logprobs.values()} == {len(tokens)}
    assert "".join(tokens) == text
    offset = 0
    for token, start in zip(tokens, logprobs["text_offset"], strict=True):
        assert start == offset
        offset += len(token)
    nulls = [i for i, value in enumerate(logprobs["token_logprobs"]) if value is None]
    assert nulls == [i for i, value in enumerate(logprobs["top_logprobs"]) if value is None]
    assert nulls == ([0] if echo else [])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["fox, cr"], "The quick brown "),
        (["brown", "brown fox"], "The quick "),
        (["brown fix", "quick red"], TEXT),
        ([f"{CHILLI}{CHILLI} a"], "The quick brown fox, crème brûlée "),
        (["The"], ""),
        ([TEXT + "!"], TEXT),
    ],
)
def test_stop_strings(
    tokenizer: Tokenizer, path: str, stride: int, stops: list[str], text: str
) -> None:
    front = front_of(tokenizer, saying(tokenizer, TEXT), stride=stride)
    prompt = {"prompt": TEXT} if path == COMPLETIONS else {"messages": MESSAGES}
    choices, usage = both(front, path, {**prompt, "stop": stops, "max_tokens": 100})
    assert choices[0]["text"] == text
    assert choices[0]["finish_reason"] == "stop"
    backend = front.service.backend
    assert isinstance(backend, FakeBackend)
    ended_early = text != TEXT
    assert len(backend.aborted) == (2 if ended_early else 0)
    # Output tokens are counted up to the one that completes the stop string, no further.
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    decoded = [tokenizer.decode(ids[:i]) for i in range(len(ids) + 1)]
    needed = [i for i, so_far in enumerate(decoded) if any(stop in so_far for stop in stops)]
    assert usage["completion_tokens"] == (needed[0] if ended_early else len(ids) + 1)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}


def test_stop_string_included(tokenizer: Tokenizer) -> None:
    front = front_of(tokenizer, saying(tokenizer, TEXT))
    body = {"prompt": "x", "stop": "own fo", "include_stop_str_in_output": True, "max_tokens": 50}
    whole = front.complete(**body)["choices"][0]
    assert (whole["text"], whole["stop_reason"]) == ("The quick brown fo", "own fo")
    assert both(front, COMPLETIONS, body)[0][0]["text"] == "The quick brown fo"


def test_stop_token(tokenizer: Tokenizer) -> None:
    front = front_of(tokenizer, saying(tokenizer, TEXT))
    fox = tokenizer.encode(" fox", add_special_tokens=False)
    body = {"prompt": "x", "stop_token_ids": fox, "max_tokens": 50, "logprobs": 0}
    whole = front.complete(**body)["choices"][0]
    assert (whole["text"], whole["stop_reason"]) == ("The quick brown", fox[0])
    both(front, COMPLETIONS, body)
    included = front.complete(**body, include_stop_str_in_output=True)["choices"][0]
    assert included["text"] == "The quick brown fox"


def test_stop_strings_are_not_looked_for_before_min_tokens(tokenizer: Tokenizer) -> None:
    front = front_of(tokenizer, saying(tokenizer, "one two one two"))
    body = {"prompt": "x", "stop": [" two"], "min_tokens": 2, "max_tokens": 50}
    assert both(front, COMPLETIONS, body)[0][0]["text"] == "one two one"


def test_chat_choices_end_each_in_their_own_way(tokenizer: Tokenizer) -> None:
    texts = ("ends by itself", "goes on and on and on and on", "meets a stop string there")
    front = front_of(tokenizer, saying(tokenizer, *texts))
    body = {"messages": MESSAGES, "n": 3, "max_tokens": 8, "stop": " string", "seed": 1}
    choices, usage = both(front, CHAT, body)
    assert [choices[i]["text"] for i in range(3)] == [
        "ends by itself",
        "goes on and on and on and",
        "meets a stop",
    ]
    assert [choices[i]["finish_reason"] for i in range(3)] == ["stop", "length", "stop"]
    counts = [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    assert usage["completion_tokens"] == (counts[0] + 1) + 8 + (counts[2] - 1)
    for chunk in front.stream(CHAT, **body):
        (choice,) = chunk["choices"]
        assert "finish_reason" in choice
        assert choice["finish_reason"] in (None, "stop", "length")


USAGE_CASES: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"stream_options": None}, False),
    ({"stream_options": {}}, False),
    ({"stream_options": {"include_usage": False}}, False),
    ({"stream_options": {"include_usage": None}}, False),
    ({"stream_options": {"include_usage": True}}, True),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("options", "wanted"), USAGE_CASES)
def test_usage_chunk(
    tokenizer: Tokenizer, path: str, n: int, options: dict[str, Any], wanted: bool
) -> None:
    front = front_of(tokenizer, saying(tokenizer, "one two three", "four"))
    prompt = {"prompt": [5, 6]} if path == COMPLETIONS else {"messages": MESSAGES}
    chunks = front.stream(path, **prompt, n=n, **options)
    if not wanted:
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
        return
    *earlier, last = chunks
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in earlier)
    assert last["choices"] == []
    output = 4 if n == 1 else 4 + 2
    assert last["usage"]["completion_tokens"] == output
    assert last["usage"]["total_tokens"] == output + last["usage"]["prompt_tokens"]


def test_usage_so_far_in_every_chunk(tokenizer: Tokenizer) -> None:
    front = front_of(tokenizer, saying(tokenizer, "one two three"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = front.stream(COMPLETIONS, prompt=[5, 6], stream_options=options)
    counts = [(c["usage"]["prompt_tokens"], c["usage"]["completion_tokens"]) for c in chunks]
    assert counts == [(2, 1), (2, 2), (2, 3), (2, 4), (2, 4)]
    alone = {"continuous_usage_stats": True}
    chunks = front.stream(COMPLETIONS, prompt=[5, 6], stream_options=alone)
    assert all("usage" not in chunk for chunk in chunks)


def test_receipt(tokenizer: Tokenizer) -> None:
    front = front_of(tokenizer, saying(tokenizer, "one"))
    usage = front.complete(prompt=["a", "b"], n=2)["usage"]
    assert usage["quire"] == {
        "preemptions": 4,
        "mode": "mixed",
        "recomputed_tokens": 20,
        "restored_tokens": 28,
        "stall_ms": 1000.0,
        "cached_tokens": 6,
        "host_cached_tokens": 4,
        "failovers": 0,
        "moves": 0,
    }
    assert usage["prompt_tokens_details"] == {"cached_tokens": 10}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stop", [None, " there", "\U0001f336"])
def test_prompt_that_ends_inside_a_character(
    tokenizer: Tokenizer, n: int, stop: str | None
) -> None:
    ids = tokenizer.encode("Hello world " + CHILLI, add_special_tokens=False)
    cut = next(i for i in range(len(ids)) if "\ufffd" in tokenizer.decode(ids[:i]))
    rest = [*ids[cut:], *tokenizer.encode(" is there", add_special_tokens=False)]
    front = front_of(tokenizer, always(rest))
    body: dict[str, Any] = {"prompt": ids[:cut], "n": n, "max_tokens": 8, "stop": stop}
    expected = CHILLI + " is there"
    if stop is not None:
        expected = expected[: expected.index(stop)]
    for index in range(n):
        assert both(front, COMPLETIONS, body)[0][index]["text"] == expected
        echoed = both(front, COMPLETIONS, {**body, "echo": True, "logprobs": 1})[0][index]
        assert echoed["text"] == "Hello world " + expected


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [0, 3])
def test_echo_and_logprobs(tokenizer: Tokenizer, echo: bool, logprobs: int) -> None:
    prompts = [f"Stir the {CHILLI} in, then wait", "Second"]
    front = front_of(tokenizer, saying(tokenizer, TEXT))
    body = {"prompt": prompts, "n": 2, "echo": echo, "logprobs": logprobs, "max_tokens": 10}
    choices, usage = both(front, COMPLETIONS, body)
    assert len(choices) == 4
    for index, choice in choices.items():
        prompt = prompts[index // 2] if echo else ""
        assert choice["text"].startswith(prompt + "The quick brown fox")
        check_legacy(choice["text"], choice["logprobs"], echo)
        own = len(tokenizer.encode(prompt, add_special_tokens=True))
        assert len(choice["logprobs"]["tokens"]) == own + 10
        for token, row in zip(
            choice["logprobs"]["tokens"][1:], choice["logprobs"]["top_logprobs"][1:], strict=True
        ):
            assert token in row
            assert len(row) <= max(1, logprobs)
    assert usage["completion_tokens"] == 40


@pytest.mark.parametrize("top", [0, 2])
def test_chat_logprobs(tokenizer: Tokenizer, top: int) -> None:
    front = front_of(tokenizer, saying(tokenizer, TEXT))
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": top, "max_tokens": 50}
    choice = both(front, CHAT, body)[0][0]
    *content, last = choice["logprobs"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == TEXT
    assert last["token"] == "<|im_end|>"
    assert all(len(token["top_logprobs"]) == top for token in content)
    assert all(set(token) == {"token", "logprob", "bytes", "top_logprobs"} for token in content)
    absent = {**body, "logprobs": False, "top_logprobs": None}
    assert both(front, CHAT, absent)[0][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("stop", "tokens"),
    [("own fox", ["The", " quick", " br"]), (" brown fox", ["The", " quick"]), ("The", [])],
)
def test_logprobs_end_where_a_stop_string_cuts(
    tokenizer: Tokenizer, stop: str, tokens: list[str]
) -> None:
    front = front_of(tokenizer, saying(tokenizer, TEXT))
    body = {"prompt": "x", "logprobs": 1, "max_tokens": 50, "stop": stop}
    choice = both(front, COMPLETIONS, body)[0][0]
    assert choice["logprobs"]["tokens"] == tokens
    check_legacy(choice["text"], choice["logprobs"], echo=False)


def test_prompt_logprobs(tokenizer: Tokenizer) -> None:
    front = front_of(tokenizer, saying(tokenizer, "one"), choice_0_late=True)
    body = {"prompt": [5, 600, 7], "prompt_logprobs": 2, "n": 2}
    for choice in front.complete(**body)["choices"]:
        first, second, third = choice["prompt_logprobs"]
        assert first is None
        assert set(second["600"]) == {"logprob", "rank", "decoded_token"}
        assert len(second) == len(third) == 2
    chunks = front.stream(COMPLETIONS, **body)
    with_rows = [c["choices"][0] for c in chunks if "prompt_logprobs" in c["choices"][0]]
    assert sorted(choice["index"] for choice in with_rows) == [0, 1]
    whole = front.chat(messages=MESSAGES, prompt_logprobs=0)
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    chunk = front.stream(CHAT, messages=MESSAGES, prompt_logprobs=0)[0]
    assert chunk["prompt_logprobs"] == whole["prompt_logprobs"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_ids(tokenizer: Tokenizer, path: str) -> None:
    front = front_of(tokenizer, saying(tokenizer, TEXT), stride=2)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    prompt = {"prompt": [5, 6]} if path == COMPLETIONS else {"messages": MESSAGES}
    body = {**prompt, "return_token_ids": True, "max_tokens": 60}
    whole = front.request("POST", path, json=body).json()
    assert whole["choices"][0]["token_ids"] == [*ids, 2]
    chunks = front.stream(path, **body)
    streamed = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert streamed == [*ids, 2]
    holder, first = (whole, chunks[0])
    if path == COMPLETIONS:
        holder, first = whole["choices"][0], chunks[0]["choices"][0]
    assert first["prompt_token_ids"] == holder["prompt_token_ids"]
    assert len(holder["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]


def test_batch_keeps_the_order_of_prompts(tokenizer: Tokenizer) -> None:
    def script(request: GenerateRequest, choice: int) -> Sequence[int]:
        # The first prompt is the slowest to end.
        return [request.prompt_token_ids[0] + choice] * (20 - request.prompt_token_ids[0])

    front = front_of(tokenizer, script)
    prompts = [[10 + i] for i in range(5)]
    whole = front.complete(prompt=prompts, n=2, return_token_ids=True, max_tokens=50)
    for index, choice in enumerate(whole["choices"]):
        prompt, of_prompt = divmod(index, 2)
        assert choice["index"] == index
        assert choice["prompt_token_ids"] == prompts[prompt]
        assert choice["token_ids"][0] == 10 + prompt + of_prompt


def test_what_comes_together_goes_out_in_one_write(tokenizer: Tokenizer) -> None:
    front = front_of(tokenizer, saying(tokenizer, "one two three"))
    client = RawClient(front.app)
    asyncio.run(client.post(COMPLETIONS, {"prompt": "x", "n": 4, "stream": True}))
    writes = [part for part in client.parts if part]
    assert len(writes) == 4 + 1
    assert len(events(b"".join(writes))) == 4 * 4


def test_text_is_safe_for_clients_that_split_lines_as_python_does(tokenizer: Tokenizer) -> None:
    text = "a\u2028b\x85c\rd\ne\x0bf"
    front = front_of(tokenizer, saying(tokenizer, text))
    response = front.request("POST", COMPLETIONS, json={"prompt": "x", "stream": True})
    assert len(response.text.splitlines()) == 2 * response.text.count("\n\n")
    assert join_completion(events(response.content))[0]["text"] == text
