"""What an engine refuses, how it forgets aborted work, and that it stays as good as new."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kernels.dispatch import KernelBackendError
from replicas.core.scheduler import RequestRefusedError
from replicas.engine.pool_size import PoolSizeError
from replicas.protocol import FinishReason
from tests.replicas.engine.driver import (
    BOTH_DEPTHS,
    ONE_STEP,
    Client,
    ask,
    assert_same,
    make_engine,
    serve,
    tokens,
)
from tests.replicas.engine.tiny_models import EOS, Twin, random_prompt

pytestmark = BOTH_DEPTHS


@ONE_STEP
def test_what_can_never_be_served_is_refused_and_harms_nobody(llama: Twin) -> None:
    engine = make_engine(llama.paged, num_gpu_blocks_override=6, max_model_len=60)
    client = Client(engine)
    client.send(ask("served", random_prompt(20), 10))
    client.step(3)
    refusals = [
        (ask("empty", ()), "the prompt is empty"),
        (ask("pool", random_prompt(48)), "48 tokens and one more do not fit the KV pool of 48"),
        (ask("served", random_prompt(5)), "'served' is in use"),
    ]
    for request, message in refusals:
        with pytest.raises(RequestRefusedError, match=message):
            engine.add(request)
    assert engine.live_request_ids() == ["served"]
    assert client.run()["served", 0].token_ids == llama.generate(random_prompt(20), 10)
    serve(engine, ask("served", random_prompt(47), 1))  # the id is free again, and it just fits


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused(llama: Twin) -> None:
    engine = make_engine(llama.paged, max_model_len=30)
    with pytest.raises(RequestRefusedError, match=r"30 tokens leave no room .* max_model_len 30"):
        engine.add(ask("long", random_prompt(30)))
    answer = serve(engine, ask("just fits", random_prompt(29)))["just fits", 0]
    assert answer.token_ids == llama.generate(random_prompt(29), 1)
    assert answer.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 512),
        ({"num_gpu_blocks_override": 10}, 80),
        ({"max_model_len": 100}, 100),
        ({"num_gpu_blocks_override": None, "kv_cache_memory_gib": 2**-12}, 504),
    ],
    ids=["the model's", "the pool's", "as configured", "the pool's, by memory"],
)
@ONE_STEP
def test_the_limit_of_a_choice(llama: Twin, config: dict[str, Any], expected: int) -> None:
    assert make_engine(llama.paged, **config).info.max_model_len == expected


@ONE_STEP
def test_an_engine_says_what_it_is(llama: Twin) -> None:
    info = make_engine(llama.paged, num_gpu_blocks_override=10, kv_cache_dtype="bfloat16").info
    assert (info.device, info.dtype, info.kv_dtype) == ("cpu", "float32", "bfloat16")
    assert (info.block_size, info.num_blocks, info.kv_tokens) == (8, 10, 80)
    assert info.vocab_size == 192


def test_triton_without_a_gpu_is_an_error_of_construction(llama: Twin) -> None:
    with pytest.raises(KernelBackendError, match="kernel_backend 'triton' needs an NVIDIA GPU"):
        make_engine(llama.paged, kernel_backend="triton")
    for backend in ("auto", "torch"):
        serve(make_engine(llama.paged, kernel_backend=backend), ask("a", (5, 6), 1))


@ONE_STEP
def test_an_impossible_size_is_an_error_of_construction(llama: Twin) -> None:
    with pytest.raises(PoolSizeError, match="context of 512 tokens"):
        make_engine(llama.paged, max_model_len=513)
    with pytest.raises(PoolSizeError, match="no room for a KV block"):
        make_engine(llama.paged, num_gpu_blocks_override=None, kv_cache_memory_gib=1e-6)


@pytest.mark.parametrize("choice", [None, 0, 2])
def test_aborting_in_any_state_leaves_no_trace(llama: Twin, choice: int | None) -> None:
    """Waiting, in the midst of a chunked prefill, forked, decoding, preempted, ended."""
    requests = [
        ask("first", random_prompt(30), 24),
        ask("forks", random_prompt(50), 12, n=3, temperature=1.0, logprobs=0),
        ask("last", random_prompt(10), 20),
    ]
    expected = serve(make_engine(llama.paged), *requests)
    seen = set()
    preemptions = 0
    for steps in (0, 1, 3, 5, 7, 9, 12, 16, 20, 26):
        engine = make_engine(
            llama.paged, num_gpu_blocks_override=16, max_num_batched_tokens=16, max_num_seqs=4
        )
        client = Client(engine)
        client.send(*requests)
        client.step(steps)
        before = engine.snapshot()
        client.abort("forks", choice)
        client.abort("forks", choice)
        client.abort("unknown")
        answers = client.run()
        aborted = {
            key for key, answer in answers.items() if answer.finish_reason == FinishReason.ABORT
        }
        assert aborted <= {("forks", i) for i in range(3) if choice in {None, i}}
        seen.add((before.running, before.waiting, len(aborted)))
        preemptions += engine.stats.preemptions
        for key in aborted:
            answer = answers.pop(key)
            partial = expected[key].token_ids[: len(answer.token_ids)]
            assert answer.token_ids == partial
            assert answer.receipt is not None
        assert_same(answers, {key: expected[key] for key in answers})
    assert len(seen) > 5, "the states were not as different as they should be"
    assert preemptions > 0


def test_three_hundred_rounds_of_mixed_traffic_lose_no_block(llama: Twin) -> None:
    """O07, with a pool that is too small at times."""
    source = random.Random(7)
    engine = make_engine(llama.paged, num_gpu_blocks_override=24)
    total = engine.info.num_blocks
    largest = ask("largest", random_prompt(total * 8 - 1), 1)
    first = serve(engine, largest)
    client = Client(engine)
    shared = random_prompt(24)
    for round_number in range(300):
        kind = source.choice(["same", "new", "half", "choices"])
        prompt = {
            "same": shared,
            "new": random_prompt(source.randint(1, 40), round_number),
            "half": (*shared[:12], *random_prompt(12, round_number)),
            "choices": shared,
        }[kind]
        name = f"{kind} {round_number}"
        client.send(
            ask(name, prompt, source.randint(1, 6), n=3 if kind == "choices" else 1, temperature=1)
        )
        client.step(source.randint(0, 2))
        if source.random() < 0.3:
            client.abort(source.choice(engine.live_request_ids() or [name]))
        if round_number % 50 == 49:
            client.run()
            assert 0 < engine.snapshot().cached_blocks <= total
    assert_same(serve(engine, largest), first)
    reasons = engine.stats.finished
    assert min(reasons[FinishReason.ABORT], reasons[FinishReason.LENGTH]) > 30
    assert engine.stats.prefix_cache_hits > 100


@ONE_STEP
def test_the_snapshot_tells_what_goes_on(llama: Twin) -> None:
    engine = make_engine(llama.paged, max_num_seqs=2, max_num_batched_tokens=16)
    client = Client(engine)
    client.send(*(ask(str(i), random_prompt(20, i), 4) for i in range(3)))
    before = engine.snapshot()
    assert (before.running, before.waiting, before.pending_tokens) == (0, 3, 60)
    client.step()
    after = engine.snapshot()
    assert (after.running, after.waiting, after.pending_tokens) == (1, 2, 44)
    assert after.used_blocks == 3
    client.run()
    assert engine.snapshot().cached_blocks == 3 * (22 // 8)


@ONE_STEP
def test_a_bfloat16_pool_under_a_float32_model_stays_close(llama: Twin) -> None:
    requests = [
        ask(str(length), random_prompt(length), 8, logprobs=0, prompt_logprobs=0)
        for length in (5, 16, 40)
    ]
    exact = serve(make_engine(llama.paged), *requests)
    rounded = serve(make_engine(llama.paged, kv_cache_dtype="bfloat16"), *requests)
    differences = []
    for key, answer in rounded.items():
        assert answer.prompt_logprobs is not None
        for ours, theirs in zip(
            answer.prompt_logprobs, exact[key].prompt_logprobs or (), strict=True
        ):
            differences.append(abs(ours.logprob - theirs.logprob))
    assert 1e-4 < max(differences) < 0.15


def test_a_sampled_choice_gives_alone_what_it_gives_in_a_crowd(llama: Twin) -> None:
    """It runs alone where the other choices are aborted before the first step."""
    requests = [
        ask(str(length), random_prompt(length), 12, n=4, temperature=1.0, seed=length)
        for length in (1, 16, 33)
    ]
    crowd = tokens(serve(make_engine(llama.paged), *requests))
    assert len({tuple(output) for output in crowd.values()}) == 12
    for request in requests:
        for choice in range(4):
            client = Client(make_engine(llama.paged))
            client.send(request)
            for other in {0, 1, 2, 3} - {choice}:
                client.abort(request.request_id, other)
            key = (request.request_id, choice)
            assert client.run()[key].token_ids == crowd[key]


@pytest.mark.parametrize("temperature", [1e-7, 1e-6, 1e-5, 1e-4])
def test_tiny_temperatures_are_greedy(llama: Twin, temperature: float) -> None:
    """O15."""
    requests = [
        ask("plain", random_prompt(20), temperature=temperature, logprobs=1),
        ask("biased", random_prompt(20), temperature=temperature, logit_bias=((0, -100.0),)),
        ask("greedy", random_prompt(20), temperature=0.0),
    ]
    outputs = tokens(serve(make_engine(llama.paged), *requests))
    expected = llama.generate(random_prompt(20), 16)
    assert outputs["plain", 0] == outputs["greedy", 0] == expected
    assert 0 in expected or outputs["biased", 0] == expected


def test_stops_at_the_models_end_at_stop_tokens_and_not_before_min_tokens(llama: Twin) -> None:
    prompt = random_prompt(20)
    expected = llama.generate(prompt, 16)
    stop = expected[4]
    at = expected.index(stop)
    requests = [
        ask("stopped", prompt, stop_token_ids=(stop,)),
        ask("held", prompt, stop_token_ids=(stop,), min_tokens=at + 3),
        ask("eos", prompt, ignore_eos=False, logit_bias=((EOS, 100.0),)),
        ask("eos ignored", prompt, logit_bias=((EOS, 100.0),)),
    ]
    answers = serve(make_engine(llama.paged), *requests)
    stopped, held, eos, ignored = (answers[request.request_id, 0] for request in requests)
    assert (stopped.token_ids, stopped.stop_token_id) == (expected[: at + 1], stop)
    assert stopped.finish_reason == eos.finish_reason == FinishReason.STOP
    assert held.token_ids[:at] == expected[:at]
    assert stop not in held.token_ids[: at + 2]
    assert (eos.token_ids, eos.stop_token_id) == ([EOS], EOS)
    assert ignored.token_ids == [EOS] * 16
    assert ignored.finish_reason == FinishReason.LENGTH


def test_salts_keep_prefixes_apart(llama: Twin) -> None:
    """Equal prompts of other tenants are no hits, and answer the same."""
    engine = make_engine(llama.paged)
    prompt = random_prompt(40)
    answers = []
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "tenant"), ("d", "")):
        request = ask(name, prompt, cache_salt=salt)
        answers.append(serve(engine, request)[name, 0])
    assert [answer.took.cached_tokens for answer in answers] == [0, 0, 32, 32]
    assert all(answer.token_ids == answers[0].token_ids for answer in answers)


def test_no_prefix_is_kept_where_caching_is_off(llama: Twin) -> None:
    engine = make_engine(llama.paged, enable_prefix_caching=False)
    first, second = (serve(engine, ask("same", random_prompt(40))) for _ in range(2))
    assert tokens(first) == tokens(second)
    assert engine.snapshot().cached_blocks == engine.stats.prefix_cache_hits == 0
