"""Requests that another replica lost: they go on where they were, as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler import RequestRefusedError
from replicas.protocol import ChoiceProgress, GenerateRequest
from tests.replicas.core.builders import make_request
from tests.replicas.core.harness import BOTH_DEPTHS, Replica

pytestmark = BOTH_DEPTHS


def lost(replica: Replica, data: GenerateRequest) -> GenerateRequest:
    """What the ingress sends to the next replica: what clients have seen of `data`."""
    progress = tuple(
        ChoiceProgress(tuple(replica.outputs[key]), finished=key in replica.last)
        for key in ((data.request_id, index) for index in range(data.n))
    )
    return replace(data, progress=progress)


def test_known_outputs_are_computed_in_one_prefill_and_not_drawn_again() -> None:
    data = make_request("a", range(6), max_tokens=8)
    first, second = Replica(16), Replica(16)
    first.submit(data)
    for _ in range(3):
        first.step()
    second.submit(lost(first, data))
    (item,) = second.step().scheduled
    assert (item.start, len(item.token_ids)) == (0, 9)
    assert [draw.output_index for draw in item.draws] == [3]
    second.run()
    receipt = second.last["a", 0].receipt
    assert receipt is not None
    assert receipt.recomputed_tokens == 8
    assert receipt.cached_tokens == receipt.preemptions == 0
    assert second.scheduler.stats.prefix_cache_queries == 0


def test_the_choices_of_a_request_come_back_one_by_one() -> None:
    data = make_request("a", range(6), n=3, max_tokens=9)
    data = replace(data, sampling=replace(data.sampling, ignore_eos=False))
    first, second = Replica(32), Replica(32)
    first.submit(data)
    while len(first.last) < 1:
        first.step()
    ended = {index for _, index in first.last}
    second.submit(lost(first, data))
    second.run()
    assert {index for _, index in second.last} == {0, 1, 2} - ended


def test_one_that_had_produced_nothing_beside_others_that_had() -> None:
    data = make_request("a", range(5), n=2, max_tokens=4)
    replica = Replica(16)
    whole = Replica(16)
    whole.submit(data)
    whole.run()
    seen = tuple(whole.outputs["a", 1][:2])
    replica.submit(replace(data, progress=(ChoiceProgress(), ChoiceProgress(seen))))
    replica.run()
    assert replica.outputs == whole.outputs


def test_what_fills_the_whole_pool_still_gets_its_last_token() -> None:
    data = make_request("a", range(6), max_tokens=100)
    first, second = Replica(2), Replica(2)  # 8 tokens of KV: a choice may reach 9
    first.submit(data)
    while len(first.outputs["a", 0]) < 2:
        first.step()
    second.submit(lost(first, data))
    second.run()
    assert len(second.outputs["a", 0]) == 3


@pytest.mark.parametrize(
    ("progress", "match"),
    [
        ((ChoiceProgress((1,)),), "each choice"),
        ((ChoiceProgress((1,), finished=True),) * 2, "unfinished"),
        ((ChoiceProgress((1,)), ChoiceProgress(tuple(range(60)))), "64 tokens .* exceed the 32"),
    ],
)
def test_bad_progress_is_refused(progress: tuple[ChoiceProgress, ...], match: str) -> None:
    replica = Replica(8)
    data = replace(make_request("a", range(4), n=2), progress=progress)
    with pytest.raises(RequestRefusedError, match=match):
        replica.scheduler.add(data, 0.0)
    assert not replica.scheduler.requests


@given(
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=14),
    n=st.integers(1, 3),
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    max_tokens=st.integers(1, 14),
    host_slots=st.sampled_from((0, 6)),
    caching=st.booleans(),
    ignore_eos=st.booleans(),
)
def test_any_chain_of_lost_replicas_equals_one_that_lives(
    prompt: list[int],
    n: int,
    steps: list[int],
    max_tokens: int,
    host_slots: int,
    caching: bool,
    ignore_eos: bool,
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, seed=5, ignore_eos=ignore_eos)
    original = data = make_request("a", prompt, n=n, sampling=sampling)
    seen: dict[int, list[int]] = {index: [] for index in range(n)}
    for count in (*steps, None):
        # Tight: choices of one request preempt each other.
        replica = Replica(8, host_slots=host_slots, caching=caching, copy_steps=1)
        replica.submit(data, make_request("b", range(5), max_tokens=6))
        if count is None:
            replica.run()
        for _ in range(count or 0):
            replica.step()
        for (request_id, index), outputs in replica.outputs.items():
            if request_id == "a":
                seen[index] = outputs
        done = {index for index in seen if ("a", index) in replica.last}
        done |= {i for i, each in enumerate(data.progress) if each.finished}
        if len(done) == n:
            break
        data = replace(
            original,
            progress=tuple(ChoiceProgress(tuple(seen[i]), finished=i in done) for i in range(n)),
        )
        if not any(seen.values()):
            data = original
    whole = Replica(64)
    whole.submit(original)
    whole.run()
    assert {("a", index): outputs for index, outputs in seen.items()} == whole.outputs


def test_one_that_comes_from_a_lost_replica_is_protected_until_it_made_progress() -> None:
    """Like any resumed one: else it would go from hand to hand."""
    replica = Replica(6, min_progress_tokens=3, max_num_seqs=3)
    taken = make_request("taken", range(20, 27), max_tokens=20)
    replica.submit(
        make_request("leader", range(3), max_tokens=4),
        make_request("needy", range(10, 13), max_tokens=12),
        replace(taken, progress=(ChoiceProgress((1,)),)),
    )
    while replica.scheduler.has_work and not replica.scheduler.stats.preemptions:
        replica.step()
    choice = replica.choice("taken")
    assert choice.preemptions == 0 or len(choice.output_token_ids) >= 1 + 3
    for request_id in ("leader", "needy", "taken"):
        replica.abort(request_id)
