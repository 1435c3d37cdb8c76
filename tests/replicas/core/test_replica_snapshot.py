"""The figures that a replica publishes of itself."""

from __future__ import annotations

import pytest

from replicas.core import replica_snapshot
from replicas.core.cost_model import CostModel
from replicas.protocol import ReplicaSnapshot
from tests.replicas.core.builders import make_request
from tests.replicas.core.harness import Replica

PREFIX = tuple(range(1, 17))


def take(replica: Replica) -> ReplicaSnapshot:
    return replica_snapshot.take(replica.scheduler)


def test_an_idle_replica_has_nothing_to_do() -> None:
    snapshot = take(Replica(num_blocks=8))
    assert (snapshot.running, snapshot.waiting, snapshot.pending_tokens) == (0, 0, 0)
    assert (snapshot.queued_tokens, snapshot.expected_tokens, snapshot.decode_step_s) == (0, 0, 0.0)


def test_what_is_left_of_a_prefill_is_queued_and_a_decoding_choice_is_not() -> None:
    replica = Replica(num_blocks=20, budget=4)
    replica.submit(make_request("r", range(1, 11), max_tokens=4))
    assert take(replica).queued_tokens == 10
    replica.step()
    assert take(replica).queued_tokens == 6
    replica.step()
    replica.step()
    snapshot = take(replica)
    assert (snapshot.queued_tokens, snapshot.pending_tokens) == (0, 1)
    replica.run()


def test_a_single_token_of_a_prompt_is_prefill() -> None:
    replica = Replica(num_blocks=20, budget=4)
    replica.submit(make_request("r", range(1, 6)))
    replica.step()
    assert take(replica).queued_tokens == 1
    replica.run()


def test_a_waiting_prompt_counts_without_what_the_device_has_of_it() -> None:
    replica = Replica(num_blocks=20, max_num_seqs=1)
    replica.submit(make_request("before", PREFIX))
    replica.run()
    replica.submit(make_request("runs", (7, 7)))
    replica.step()
    replica.submit(make_request("waits", (*PREFIX, 9, 9, 9)), make_request("other", (9, *PREFIX)))
    snapshot = take(replica)
    assert snapshot.queued_tokens == 3 + 17
    assert snapshot.pending_tokens == 1 + 19 + 17
    replica.run()


def test_a_whole_prompt_that_is_cached_costs_at_least_a_token() -> None:
    replica = Replica(num_blocks=20)
    replica.submit(make_request("before", PREFIX))
    replica.run()
    replica.submit(make_request("again", PREFIX))
    assert take(replica).queued_tokens == 4, "the block of the last token is computed anew"
    replica.run()


@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_choice_counts_without_what_the_host_keeps(caching: bool) -> None:
    replica = Replica(num_blocks=6, host_slots=20, copy_steps=1, caching=caching)
    replica.submit(*(make_request(f"r{i}", (i, 1, 2, 3, 4), max_tokens=14) for i in (1, 2)))
    while not replica.scheduler.stats.swaps:
        replica.step()
    (waiting,) = replica.scheduler.waiting
    known = waiting.num_known_tokens
    snapshot = take(replica)
    assert snapshot.queued_tokens == known - (known - 1) // 4 * 4
    assert snapshot.preemptions == 1
    replica.run()


def test_what_is_arriving_from_the_host_is_not_to_be_prefilled() -> None:
    replica = Replica(num_blocks=6, host_slots=20, copy_steps=3)
    replica.submit(*(make_request(f"r{i}", (i, 1, 2, 3, 4), max_tokens=14) for i in (1, 2)))
    while not any(choice.arriving for choice in replica.scheduler.running):
        replica.step()
    (choice,) = (c for c in replica.scheduler.running if c.arriving)
    rest = choice.num_remaining_tokens - 4 * len(choice.arriving)
    assert take(replica).queued_tokens == rest
    assert 1 <= rest <= 4
    replica.run()


def test_outputs_to_come_are_counted_for_choices_not_born_yet_as_well() -> None:
    replica = Replica(num_blocks=40, budget=4)
    replica.submit(make_request("r", range(1, 9), max_tokens=10, n=3))
    replica.step()
    assert take(replica).expected_tokens == 30
    replica.step()
    assert take(replica).expected_tokens == 27
    replica.run()


def test_rates_are_those_of_the_cost_model() -> None:
    costs = CostModel(block_bytes=4)
    replica = Replica(num_blocks=20, costs=costs, token_s=0.25)
    replica.submit(make_request("r", range(1, 9), max_tokens=3))
    replica.run()
    snapshot = take(replica)
    assert snapshot.decode_step_s == 0.25
    assert snapshot.prefill_tokens_per_s == costs.prefill.per_second
    assert snapshot.written_bytes_per_s == costs.write.per_second
    assert snapshot.read_bytes_per_s == costs.read.per_second
