"""Requests with several choices: one prefill, shared blocks, copies on write, own ways."""

from __future__ import annotations

from dataclasses import replace

import pytest

from replicas.core.block_transfer import Restore
from replicas.core.request import ChoiceState
from tests.replicas.core.builders import make_request, with_prompt_logprobs
from tests.replicas.core.harness import BOTH_DEPTHS, ONE_STEP, Replica

pytestmark = BOTH_DEPTHS


def states(replica: Replica, request_id: str) -> str:
    """One letter a choice: Pending, Waiting, Running, Finished."""
    return "".join(c.state.name[0] for c in replica.scheduler.requests[request_id].choices)


def test_the_prompt_is_prefilled_once_and_all_choices_draw_from_it() -> None:
    replica = Replica(16, budget=4)
    replica.submit(make_request("a", range(10), n=4))
    for _ in range(2):
        assert replica.step().scheduled[0].draws == ()
        assert states(replica, "a") == "RPPP"
    (item,) = replica.step().scheduled
    assert [draw.key for draw in item.draws] == [("a", i) for i in range(4)]
    assert states(replica, "a") == "RRRR"
    assert replica.scheduler.stats.computed_tokens == 10
    assert replica.scheduler.kv.pool.num_used == 3
    replica.run()
    assert replica.scheduler.stats.preemptions == 0


def test_all_writers_but_the_last_copy_the_shared_partial_block() -> None:
    replica = Replica(16)
    replica.submit(make_request("a", range(6), n=4))
    replica.step()
    shared = replica.choice("a").blocks[1]
    output = replica.step()
    assert len(output.block_copies) == 3
    assert {source for source, _ in output.block_copies} == {shared}
    tables = [item.blocks for item in output.scheduled]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 4
    assert not replica.step().block_copies
    replica.run()


def test_a_prompt_of_full_blocks_needs_no_copy() -> None:
    replica = Replica(16)
    replica.submit(make_request("a", range(8), n=3))
    replica.run()
    assert not any(step.block_copies for step in replica.steps)


def test_choices_draw_their_own_ways() -> None:
    replica = Replica(64)
    replica.submit(make_request("a", range(6), n=4, max_tokens=20))
    replica.run()
    assert len({tuple(outputs) for outputs in replica.outputs.values()}) == 4


@pytest.mark.parametrize("caching", [True, False])
def test_choices_without_a_seat_wait(caching: bool) -> None:
    replica = Replica(16, max_num_seqs=2, caching=caching)
    replica.submit(make_request("a", range(6), n=4))
    replica.step()
    assert states(replica, "a") == "RRWW"
    assert all(len(outputs) == 1 for outputs in replica.outputs.values())
    replica.run()
    assert replica.scheduler.stats.preemptions == 0
    receipts = [replica.last["a", index].receipt for index in range(4)]
    assert all(receipt is not None and receipt.queue_s == 1.0 for receipt in receipts)


@pytest.mark.parametrize(
    ("num_blocks", "prompt", "expected"),
    [
        (2, 6, "RWWW"),
        (3, 6, "RRWW"),
        (4, 6, "RRRW"),
        (3, 8, "RWWW"),
        (4, 8, "RRWW"),
        (2, 7, "RWWW"),
    ],
)
def test_choices_without_a_block_for_their_next_token_wait(
    num_blocks: int, prompt: int, expected: str
) -> None:
    replica = Replica(num_blocks)
    replica.submit(make_request("a", range(prompt), n=4, max_tokens=2))
    replica.step()
    assert states(replica, "a") == expected
    replica.run()
    assert replica.scheduler.stats.preemptions == 0, "nobody runs only to be preempted at once"


def test_more_choices_than_the_pool_holds_take_turns() -> None:
    """O29: with n = 16 and room for about 4, everything ends and short ones get through."""
    replica = Replica(88, 16, budget=256, max_num_seqs=32)
    replica.submit(make_request("n", range(200), n=16, max_tokens=150))
    replica.submit(*(make_request(f"s{i}", [i] * 10, max_tokens=5) for i in range(5)))
    replica.run(2000)
    assert replica.scheduler.stats.preemptions > 0
    waits = [replica.last[f"s{i}", 0].receipt for i in range(5)]
    assert all(receipt is not None and receipt.queue_s < 10 for receipt in waits)


def test_choices_that_take_turns_get_back_all_that_was_kept_of_them() -> None:
    """O29: what was swapped out is swapped in again, and nothing of it stays on the host."""
    replica = Replica(
        88, 16, budget=256, max_num_seqs=32, host_slots=400, copy_s=0.0, caching=False
    )
    replica.submit(make_request("n", range(200), n=16, max_tokens=150))
    replica.submit(*(make_request(f"s{i}", [i] * 10, max_tokens=5) for i in range(5)))
    replica.run(2000)  # it checks that the host is empty in the end
    stats = replica.scheduler.stats
    assert stats.swaps == stats.preemptions > 0
    restores = [
        copy.digest
        for step in replica.steps
        for copy in step.host_copies
        if isinstance(copy, Restore)
    ]
    assert stats.restored_tokens == 16 * len(restores)
    assert stats.restored_tokens > 0.9 * 200 * stats.swaps
    assert stats.recomputed_tokens < 16 * stats.preemptions
    waits = [replica.last[f"s{i}", 0].receipt for i in range(5)]
    assert all(receipt is not None and receipt.queue_s < 10 for receipt in waits)


@ONE_STEP
def test_the_leader_going_first_hands_the_prefill_on() -> None:
    replica = Replica(16, budget=4)
    replica.submit(make_request("a", range(10), n=3))
    replica.step()
    replica.abort("a", 0)
    assert states(replica, "a") == "FWP"
    replica.step()
    assert replica.choice("a", 1).num_computed_tokens == 8, "the first block was found again"
    replica.run()
    assert replica.scheduler.stats.recomputed_tokens == 0


def test_the_leader_going_while_the_fork_is_in_flight() -> None:
    replica = Replica(16)
    replica.submit(make_request("a", range(10), n=3))
    output = replica.schedule()
    replica.abort("a", 0)
    assert not replica.finish_step(output).deltas
    replica.run()


def test_a_pending_choice_that_went_is_not_forked() -> None:
    replica = Replica(16)
    replica.submit(make_request("a", range(10), n=3))
    output = replica.schedule()
    replica.abort("a", 1)
    outcome = replica.finish_step(output)
    assert sorted(delta.choice for delta in outcome.deltas) == [0, 2]
    replica.run()


@pytest.mark.parametrize("budget", [4, 64])
def test_choices_of_one_token_end_at_the_fork(budget: int) -> None:
    replica = Replica(3, budget=budget, max_num_seqs=2)
    replica.submit(make_request("a", range(10), n=4, max_tokens=1))
    replica.run()
    assert len(replica.steps) == -(-10 // budget)
    assert len(replica.first_token_s) == 1


def test_a_preempted_choice_leaves_the_shared_blocks_to_the_others() -> None:
    replica = Replica(6)
    replica.submit(make_request("a", range(8), n=3, max_tokens=8))
    while not replica.scheduler.stats.preemptions:
        replica.step()
    assert states(replica, "a") == "RRW"
    prompt = replica.choice("a").blocks[:2]
    assert [replica.scheduler.kv.pool.references(b) for b in prompt] == [2, 2]
    replica.run()


def test_a_preempted_choice_recomputes_the_prompt_it_shared() -> None:
    replica = Replica(5, caching=False)
    replica.submit(make_request("other", range(4)), make_request("a", range(50, 58), n=2))
    replica.step()
    assert states(replica, "a") == "RR"
    assert replica.step().num_preempted == 1, "the other took the block"
    assert states(replica, "a") == "RW"
    replica.run()
    receipt = replica.last["a", 1].receipt
    assert receipt is not None
    assert (receipt.preemptions, receipt.recomputed_tokens) == (1, 8)


def test_only_the_first_choice_recomputes_for_prompt_logprobs() -> None:
    replica = Replica(16)
    replica.submit(make_request("warm", range(13), max_tokens=1))
    replica.run()
    replica.submit(with_prompt_logprobs(make_request("a", range(13), n=2)))
    replica.schedule()
    replica.abort("a", 0)
    output = replica.step()
    assert output.scheduled[0].start == 12
    assert output.scheduled[0].prompt_logprobs is None
    replica.run()


def test_a_request_is_pending_until_its_leader_is_admitted() -> None:
    replica = Replica(16, max_num_seqs=1)
    replica.submit(make_request("a", range(4)), replace(make_request("b", range(4)), n=2))
    replica.step()
    assert [c.state for c in replica.scheduler.requests["b"].choices] == [
        ChoiceState.WAITING,
        ChoiceState.PENDING,
    ]
    replica.run()
