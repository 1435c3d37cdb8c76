"""What a preemption is predicted to cost, term by term."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from replicas.core.block_transfer import Restore
from replicas.core.cost_model import CostModel, Rates
from replicas.core.kv_manager import KVManager
from replicas.core.preemption.last_admitted import LastAdmitted
from replicas.core.preemption.ledger import ResumeLedger
from replicas.core.preemption.preempter import Preempter, PreemptionMode
from replicas.core.request import Choice, ChoiceState, Request, Resume
from tests.replicas.core.builders import make_kv, make_request
from tests.replicas.core.harness import Replica

TOKEN_S, WRITE_S, READ_S = 1.0, 0.25, 0.125
"""To compute a token, to write a block and to read one."""
SIZE, KNOWN, FULL = 4, 22, 5
"""21 tokens have KV: five blocks are full, and two known tokens lie behind them."""
NEVER, ALWAYS, EITHER = PreemptionMode.RECOMPUTE, PreemptionMode.SWAP, PreemptionMode.AUTO


def make(*, caching: bool = True, host_slots: int = 20, token_s: float = TOKEN_S) -> KVManager:
    rates = Rates(1 / token_s, SIZE / WRITE_S, SIZE / READ_S)
    costs = CostModel(SIZE, rates)
    return make_kv(40, SIZE, caching=caching, host_slots=host_slots, costs=costs)


def victim(kv: KVManager, name: str = "v", prompt: range = range(KNOWN - 1)) -> Choice:
    """A choice whose prompt is computed, and that knows one token more."""
    choice = Request(make_request(name, prompt), rank=(0, 1), arrived_at=0.0).choices[0]
    assert kv.admit(choice, 0)
    choice.state = ChoiceState.RUNNING
    choice.num_computed_tokens = len(prompt)
    choice.output_token_ids.append(7)
    kv.publish(choice)
    return choice


def strip(kv: KVManager, choice: Choice, mode: PreemptionMode) -> Resume:
    Preempter(kv, LastAdmitted(), mode).strip(choice)
    assert choice.resume is not None
    return choice.resume


def put(kv: KVManager, digests: Sequence[bytes]) -> None:
    """Let the host have these blocks."""
    assert kv.offloader is not None
    for digest in digests:
        kv.offloader.tier.reserve(digest)
        kv.offloader.tier.keep(digest)
        kv.offloader.tier.commit(digest)


def test_recomputing_costs_all_known_tokens() -> None:
    kv = make(caching=False)
    assert strip(kv, victim(kv), NEVER).predicted_s == pytest.approx(KNOWN * TOKEN_S)


def test_recomputing_spares_what_others_hold_as_well() -> None:
    kv = make()
    first, second = victim(kv, "a", range(2 * SIZE + 1)), victim(kv)
    assert first.blocks[:2] == second.blocks[:2]
    resume = strip(kv, second, NEVER)
    assert (resume.shared_blocks, resume.own_blocks) == (2, FULL - 2)
    assert resume.predicted_s == pytest.approx((KNOWN - 2 * SIZE) * TOKEN_S)


def test_recomputing_spares_the_share_of_its_own_that_is_found_again() -> None:
    kv = make()
    victim(kv, "a", range(2 * SIZE + 1))
    choice = victim(kv)
    kv.costs.found.observe(6400.0, 1600.0)
    resume = strip(kv, choice, NEVER)
    assert resume.predicted_s == pytest.approx((KNOWN - (2 + 3 / 4) * SIZE) * TOKEN_S, rel=0.01)


def test_without_caching_nothing_is_found_again() -> None:
    kv = make(caching=False)
    kv.costs.found.observe(6400.0, 6400.0)
    resume = strip(kv, victim(kv), NEVER)
    assert resume.own_blocks == 0
    assert resume.predicted_s == pytest.approx(KNOWN * TOKEN_S)


def test_swapping_costs_a_write_and_a_read_of_each_full_block_and_the_rest() -> None:
    kv = make()
    resume = strip(kv, victim(kv), ALWAYS)
    assert resume.swapped
    rest_s = (KNOWN - FULL * SIZE) * TOKEN_S
    assert resume.predicted_s == pytest.approx(FULL * (WRITE_S + READ_S) + rest_s)


def test_swapping_writes_only_what_the_host_lacks() -> None:
    kv = make()
    choice = victim(kv)
    put(kv, choice.block_hashes[:3])
    resume = strip(kv, choice, ALWAYS)
    rest_s = (KNOWN - FULL * SIZE) * TOKEN_S
    assert resume.predicted_s == pytest.approx(2 * WRITE_S + FULL * READ_S + rest_s)


def test_swapping_reads_only_what_the_device_has_lost() -> None:
    kv = make()
    victim(kv, "a", range(2 * SIZE + 1))
    choice = victim(kv)
    kv.costs.found.observe(6400.0, 1600.0)
    resume = strip(kv, choice, ALWAYS)
    rest_s = (KNOWN - FULL * SIZE) * TOKEN_S
    expected = FULL * WRITE_S + (FULL - 2 - 3 / 4) * READ_S + rest_s
    assert resume.predicted_s == pytest.approx(expected, rel=0.01)


def test_swapping_waits_for_all_copies_under_way() -> None:
    kv = make()
    other = victim(kv, "other", range(100, 100 + 3 * SIZE + 1))
    kv.hash_kept(other)
    assert kv.swap_out(other) == 3
    for block in kv.pool.allocate(2):
        assert kv.offloader is not None
        kv.offloader.restore((1, block), block, bytes([block]))
    resume = strip(kv, victim(kv), ALWAYS)
    rest_s = (KNOWN - FULL * SIZE) * TOKEN_S
    expected = (3 + FULL) * WRITE_S + (2 + FULL) * READ_S + rest_s
    assert resume.predicted_s == pytest.approx(expected)


def test_swapping_reckons_with_losses() -> None:
    kv = make()
    kv.costs.observe_read(0, 0.0, lost=1600)
    resume = strip(kv, victim(kv), ALWAYS)
    expected = FULL * (WRITE_S + READ_S) + KNOWN * TOKEN_S
    assert resume.predicted_s == pytest.approx(expected)


@pytest.mark.parametrize(("token_s", "swaps"), [(0.09, False), (0.1, True)])
def test_auto_takes_what_costs_less(token_s: float, swaps: bool) -> None:
    """A block's copies take 0.375 s: as long as to compute its 4 tokens at 0.094 s each."""
    kv = make(token_s=token_s)
    resume = strip(kv, victim(kv), EITHER)
    assert resume.swapped is swaps
    copies_s = FULL * (WRITE_S + READ_S) if swaps else FULL * SIZE * token_s
    assert resume.predicted_s == pytest.approx(copies_s + 2 * token_s)
    assert not resume.insists


def restorable(kv: KVManager, prompt: range) -> Choice:
    """A new choice, of whose prompt the host has all full blocks and the device none."""
    choice = Request(make_request("r", prompt), rank=(0, 1), arrived_at=0.0).choices[0]
    kv.uncached_tokens(choice)  # hashes it
    put(kv, choice.block_hashes)
    return choice


@pytest.mark.parametrize(("token_s", "restores"), [(0.03, False), (0.04, True)])
def test_what_the_host_has_is_read_where_that_costs_less_than_to_compute_it(
    token_s: float, restores: bool
) -> None:
    """To read a block takes as long as to compute 4 tokens at 0.031 s each."""
    kv = make(token_s=token_s)
    choice = restorable(kv, range(21))
    assert kv.uncached_tokens(choice) == (1 if restores else 21)
    assert kv.admit(choice, 0)
    assert len(choice.arriving) == (5 if restores else 0)


def test_who_is_preempted_while_it_is_restored_goes_on_waiting() -> None:
    kv = make()
    first = victim(kv, "a", range(2 * SIZE + 1))
    choice = restorable(kv, range(21))
    assert kv.admit(choice, 0)
    assert (choice.num_found_blocks, len(choice.arriving)) == (2, 3)
    choice.state = ChoiceState.RUNNING
    assert choice.blocks[:2] == first.blocks[:2]
    resume = strip(kv, choice, EITHER)
    # The three that are under way end before the three that come then.
    assert resume.predicted_s == pytest.approx((3 + 3) * READ_S + TOKEN_S)


@pytest.mark.parametrize(("mode", "restored"), [(ALWAYS, 2), (EITHER, 0)])
def test_only_mode_swap_restores_at_any_price(mode: PreemptionMode, restored: int) -> None:
    """Reading became dear after the victim had been written."""
    costs = CostModel(SIZE, Rates(1.0, SIZE / 0.01, SIZE / 0.01))
    replica = Replica(4, caching=False, mode=mode, host_slots=8, copy_s=0.01, costs=costs)
    replica.submit(
        make_request("A", range(7), max_tokens=6), make_request("B", range(50, 57), max_tokens=5)
    )
    while not replica.scheduler.stats.preemptions:
        replica.step()
    assert replica.scheduler.stats.swaps == 1
    costs.observe_read(1000, 1000 * 100.0)
    replica.run()
    copies = [copy for step in replica.steps for copy in step.host_copies]
    assert sum(isinstance(copy, Restore) for copy in copies) == restored


def test_a_restore_that_is_given_up_counts_as_lost() -> None:
    replica = Replica(4, mode=ALWAYS, caching=False, host_slots=8, copy_steps=9, patience=3)
    replica.submit(
        make_request("A", range(7), max_tokens=6), make_request("B", range(50, 57), max_tokens=5)
    )
    while not replica.scheduler.stats.failed_copies:
        assert replica.scheduler.costs.lost_reads.part == 0.0
        replica.step()
    assert replica.scheduler.costs.lost_reads.part == replica.scheduler.stats.failed_copies == 2
    replica.run()


def test_what_a_victim_finds_is_learnt_from_its_first_admission_alone() -> None:
    """One whose restore came late is admitted again, and finds what it found and made then."""
    kv = make()
    choice = victim(kv)
    choice.resume = Resume(swapped=False, predicted_s=1.0, shared_blocks=1, own_blocks=4)
    ledger = ResumeLedger(kv.costs)
    for choice.num_found_blocks in (4, 5):
        ledger.note_admission(choice)
    assert kv.costs.found.part == 3.0


def test_what_a_victim_finds_again_is_learnt() -> None:
    """The worked example: of B's two blocks one survives."""
    replica = Replica(4, mode=NEVER)
    replica.submit(
        make_request("A", range(7), max_tokens=6), make_request("B", range(50, 57), max_tokens=5)
    )
    found = replica.scheduler.costs.found
    before = found.whole
    replica.run()
    decay = 0.5 ** (2 / found.half_life)
    assert replica.scheduler.stats.preemptions == 1
    assert (found.whole, found.part) == pytest.approx((before * decay + 2, 1.0))


def test_a_victims_blocks_are_not_spilled_for_having_been_released() -> None:
    """Whether they are written was for the preemption to decide; those of who has ended are."""
    replica = Replica(4, mode=NEVER, host_slots=20, spill_tokens=1)
    replica.submit(
        make_request("A", range(7), max_tokens=6), make_request("B", range(50, 57), max_tokens=5)
    )
    while "A" in replica.scheduler.requests:
        replica.step()
    stats = replica.scheduler.stats
    assert stats.preemptions == 1
    assert stats.spilled_blocks == 0, "though a block of B has been evicted"
    replica.run()
    replica.submit(make_request("C", range(80, 95), max_tokens=1))
    replica.run()
    assert stats.spilled_blocks > 0
