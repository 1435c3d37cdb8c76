"""A choice that lost its blocks goes on as if nothing had happened."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from replicas.engine.engine import Engine
from tests.replicas.engine.driver import (
    BOTH_DEPTHS,
    Client,
    ask,
    assert_same,
    make_engine,
    serve,
    tokens,
)
from tests.replicas.engine.tiny_models import Twin, random_prompt

SAMPLED = {"temperature": 1.0, "seed": 1234}
# Each with a seed of its own: with the same one, what is drawn of all is drawn of fewer, too.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "truncated": {**SAMPLED, "seed": 4321, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalised": {
        **SAMPLED,
        "seed": 5678,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": ((5, 3.0), (9, -100.0)),
        "min_tokens": 20,
        "ignore_eos": False,
    },
}


BLOCK = 4
MODES = pytest.mark.parametrize("mode", ["recompute", "swap"])


def tight(twin: Twin, num_blocks: int, mode: str = "recompute", **config: Any) -> Engine:
    """An engine with little KV, and, but to recompute, with plenty of host memory."""
    defaults = {
        "block_size": BLOCK,
        "num_gpu_blocks_override": num_blocks,
        "min_progress_tokens": 2,
        "preemption_mode": mode,
        "host_blocks": 0 if mode == "recompute" else 400,
    }
    return make_engine(twin.paged, **(defaults | config))


@pytest.mark.parametrize(
    ("mode", "n", "caching", "depth"),
    [
        *product(["recompute", "swap", "auto"], [1, 4], [True, False], [1]),
        ("recompute", 1, True, 2),
        ("recompute", 4, False, 2),
        ("swap", 1, False, 2),
        ("swap", 4, True, 2),
        ("auto", 4, True, 2),
    ],
)
def test_a_preempted_run_equals_the_undisturbed_one(
    llama: Twin, mode: str, n: int, caching: bool, depth: int
) -> None:
    """64 choices, drawn in all ways, in a pool for a few of them."""
    ways = list(WAYS.items())
    requests = [
        ask(f"{way} {i}", random_prompt(4 + 2 * i % 23, i), 20, n=n, logprobs=2, **sampling)
        for i in range(64 // n)
        for way, sampling in [ways[i % len(ways)]]
    ]
    undisturbed = serve(make_engine(llama.paged), *requests)
    engine = tight(llama, 24, mode, enable_prefix_caching=caching, depth=depth)
    answers = serve(engine, *requests)
    assert_same(answers, undisturbed)
    stats = engine.stats
    assert stats.preemptions >= 30
    if mode == "recompute":
        assert stats.swaps == stats.restored_tokens == 0
        assert stats.recomputed_tokens > 100
    if mode == "swap":
        assert stats.restored_tokens > 100
        for answer in answers.values():  # less than a block is left to compute again, each time
            took = answer.took
            # Before the first token is known, there may be no block but that of the last known.
            assert took.preemptions - (depth - 1) <= took.swaps <= took.preemptions
            assert took.recomputed_tokens < BLOCK * max(1, took.preemptions)


def test_each_way_of_drawing_and_each_choice_gives_other_tokens(llama: Twin) -> None:
    """Else the test above could not tell them apart."""
    requests = [ask(way, random_prompt(20), 24, n=4, **sampling) for way, sampling in WAYS.items()]
    outputs = tokens(serve(make_engine(llama.paged), *requests))
    assert len({tuple(output) for output in outputs.values()}) == 1 + 4 * (len(WAYS) - 1)


@MODES
@pytest.mark.parametrize("caching", [True, False])
@BOTH_DEPTHS
def test_a_seeded_request_among_noise(llama: Twin, caching: bool, mode: str) -> None:
    """O03: the noise of a draw does not start anew with a preemption."""
    request = ask("seeded", random_prompt(10), 120, **SAMPLED)
    alone = serve(make_engine(llama.paged), request)
    engine = tight(llama, 45, mode, enable_prefix_caching=caching)
    noise = [ask(f"noise {i}", random_prompt(20, i), 20 * i, **SAMPLED) for i in range(1, 6)]
    disturbed = serve(engine, *noise, request)["seeded", 0]
    assert disturbed.took.preemptions >= 2
    assert disturbed.token_ids == alone["seeded", 0].token_ids


@MODES
@pytest.mark.parametrize("caching", [True, False])
@BOTH_DEPTHS
def test_prompt_logprobs_of_a_prefill_preempted_half_way(
    llama: Twin, caching: bool, mode: str
) -> None:
    """O05."""
    prompt = random_prompt(320)
    scored = ask("scored", prompt, 2, logprobs=2, prompt_logprobs=2)
    alone = serve(make_engine(llama.paged, max_num_batched_tokens=32), scored)
    engine = make_engine(
        llama.paged,
        num_gpu_blocks_override=58,
        max_num_batched_tokens=32,
        enable_prefix_caching=caching,
        preemption_mode=mode,
        host_blocks=200 if mode == "swap" else 0,
    )
    client = Client(engine)
    client.send(*(ask(f"other {i}", random_prompt(20 + i, i), 60) for i in range(4)))
    client.step(8)
    client.send(scored)
    disturbed = client.run()["scored", 0]

    assert disturbed.took.preemptions > 0
    if mode == "swap":
        assert disturbed.took.swaps > 0
        assert disturbed.took.recomputed_tokens < 8 * disturbed.took.preemptions
    elif not caching:  # then what was lost is what had been computed
        assert 80 < disturbed.took.recomputed_tokens < 240
    assert disturbed.prompt_logprobs is not None
    assert len(disturbed.prompt_logprobs) == len(prompt) - 1
    assert_same({("scored", 0): disturbed}, alone)
    llama.check_logprobs(prompt, disturbed)


def test_prompt_logprobs_of_a_cached_prompt(llama: Twin) -> None:
    """O06."""
    engine = make_engine(llama.paged, block_size=16)
    for length in (15, 16, 17, 33, 64):
        prompt = random_prompt(length)
        scored = ask("scored", prompt, 2, logprobs=2, prompt_logprobs=2)
        first = serve(engine, scored)
        serve(engine, ask("sharing", (*prompt[:16], 5, 6, 7), 2))
        serve(engine, ask("cached", prompt, 2))
        again = serve(engine, scored)
        assert_same(again, first)
        assert_same(serve(make_engine(llama.paged), scored), first)
        llama.check_logprobs(prompt, again["scored", 0])
    assert engine.stats.prefix_cache_hits > 0  # of the requests between


def test_requests_that_find_no_room_do_not_disturb_those_they_share_with(llama: Twin) -> None:
    """O18: a pool of 30 blocks, a prefix of 10, and requests that come and go."""
    prefix = random_prompt(160)
    streaming = ask("streaming", prefix, 40, logprobs=0)
    quiet = serve(make_engine(llama.paged), streaming)

    engine = make_engine(llama.paged, block_size=16, num_gpu_blocks_override=30)
    serve(engine, ask("before", prefix, 1))
    client = Client(engine)
    client.send(streaming)
    client.step()
    for index in range(50):
        hopeless = ask(f"hopeless {index}", (*prefix, *random_prompt(300, index)), 4)
        client.send(hopeless)
        if index % 2:
            client.step()
            assert engine.snapshot().waiting == 1
        client.abort(hopeless.request_id)
    assert engine.snapshot().running == 1
    client.run()
    assert_same({key: client.answers[key] for key in quiet}, quiet)

    full_size = serve(engine, ask("full size", random_prompt(479), 1))["full size", 0]
    assert full_size.took.cached_tokens == 0
    before = engine.stats.prefix_cache_hits
    assert_same(serve(engine, streaming), quiet)
    assert engine.stats.prefix_cache_hits == before, "the prefix was evicted"


def test_preemptions_are_no_prefix_hits(llama: Twin) -> None:
    """O28: sixty random prompts, with pressure and without."""
    requests = [ask(str(i), random_prompt(8 + i % 20, i), 8 + i % 9) for i in range(60)]
    for num_blocks in (14, 256):
        client = Client(tight(llama, num_blocks))
        client.send(*requests)
        answers = client.run()
        stats = client.engine.stats
        preemptions = sum(answer.took.preemptions for answer in answers.values())
        assert stats.preemptions == preemptions
        assert (preemptions > 10) is (num_blocks == 14)
        assert stats.recomputed_tokens == sum(a.took.recomputed_tokens for a in answers.values())
        assert stats.prefix_cache_hits == 0
        assert all(answer.took.cached_tokens == 0 for answer in answers.values())
        prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        assert stats.prefix_cache_queries == stats.prompt_tokens == prompt_tokens
        assert stats.generation_tokens == sum(len(a.token_ids) for a in answers.values())
        assert len(client.first_token_s) == client.num_finished == len(requests)


@MODES
@pytest.mark.parametrize(("count", "depth"), [(1, 1), (1, 2), (3, 1)], indirect=["depth"])
def test_sixteen_choices_in_a_pool_for_four(llama: Twin, count: int, mode: str, depth: int) -> None:
    """O29: everything ends, and short requests do not wait for the last choice."""
    large = [
        ask(f"large {i}", random_prompt(100, i), 40, n=16, temperature=0.7) for i in range(count)
    ]
    short = [ask(f"short {i}", random_prompt(6, i), 4) for i in range(5)]
    roomy = make_engine(
        llama.paged, num_gpu_blocks_override=800, max_num_seqs=64, max_num_batched_tokens=64
    )
    undisturbed = tokens(serve(roomy, *large, *short))

    engine = make_engine(
        llama.paged,
        num_gpu_blocks_override=40,
        preemption_mode=mode,
        host_blocks=2000 if mode == "swap" else 0,
        spill_prefix_tokens=None,
    )
    client = Client(engine)
    client.send(*large)
    client.step(20)
    client.send(*short)
    while any(client.answers[request.request_id, 0].finish_reason is None for request in short):
        client.step()
    assert engine.has_work
    assert tokens(client.run()) == undisturbed
    assert engine.stats.preemptions > 10
    assert engine.snapshot().host_blocks == 0
    if mode == "swap":  # who has not filled a block yet has nothing to keep
        assert engine.stats.swaps > (0.9 if depth == 1 else 0.7) * engine.stats.preemptions
        assert engine.stats.restored_tokens > 8 * engine.stats.swaps


@BOTH_DEPTHS
def test_growing_out_of_the_pool_ends_a_choice(llama: Twin) -> None:
    """Nobody is left to give way: the answer ends, early but right."""
    request = ask("long", random_prompt(20), 100)
    engine = make_engine(llama.paged, num_gpu_blocks_override=5, max_model_len=200)
    answer = serve(engine, request)["long", 0]
    expected = llama.generate(request.prompt_token_ids, 100)
    assert answer.token_ids == expected[: len(answer.token_ids)]
    assert len(answer.token_ids) == 5 * 8 + 1 - 20
    assert answer.finish_reason == "length"


@BOTH_DEPTHS
def test_a_priority_is_kept_under_pressure(llama: Twin) -> None:
    """The lower class gives its blocks back to the higher one, and loses nothing by it."""
    requests = [
        ask(str(i), random_prompt(12, i), 30, priority=1 - i // 4, **SAMPLED) for i in range(8)
    ]
    undisturbed = serve(make_engine(llama.paged), *requests)
    client = Client(tight(llama, 46, scheduling_policy="priority"))
    client.send(*requests[:4])
    client.step(10)
    client.send(*requests[4:])
    answers = client.run()
    assert tokens(answers) == tokens(undisturbed)
    assert [answers[str(i), 0].took.preemptions for i in range(4, 8)] == [0, 0, 0, 0]
    assert sum(answers[str(i), 0].took.preemptions for i in range(4)) > 0
