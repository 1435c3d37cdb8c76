"""Predictions follow what has been measured, and say when copies pay."""

from __future__ import annotations

import pytest

from replicas.core.cost_model import CostModel, Rate, Rates

MIB = 2**20


def test_a_rate_begins_with_its_seed_and_follows_what_it_sees() -> None:
    rate = Rate.seeded(100.0, half_life=1000.0)
    assert rate.seconds_for(50.0) == pytest.approx(0.5)
    for _ in range(20):
        rate.observe(1000.0, 5.0)
    assert rate.per_second == pytest.approx(200.0, rel=0.01)


def test_a_large_observation_outweighs_small_ones() -> None:
    rate = Rate.seeded(100.0, half_life=1000.0)
    rate.observe(5000.0, 10.0)
    for _ in range(5):
        rate.observe(1.0, 1.0)
    assert rate.per_second > 300.0


@pytest.mark.parametrize(("amount", "seconds"), [(0.0, 1.0), (1.0, 0.0), (5.0, -1.0)])
def test_what_says_nothing_is_not_observed(amount: float, seconds: float) -> None:
    rate = Rate.seeded(100.0, half_life=1000.0)
    rate.observe(amount, seconds)
    assert rate.per_second == 100.0


def test_prefill_is_priced_at_its_margin_over_a_decoding_step() -> None:
    costs = CostModel(MIB)
    for _ in range(50):
        costs.observe_step(0, 8, 0.1)
        assert costs.observe_step(100, 8, 0.3) == pytest.approx(0.002)
    assert costs.compute_s(100) == pytest.approx(0.2, rel=0.05)
    for _ in range(200):
        costs.observe_step(100, 0, 0.3)  # alone, it bears the whole step
    assert costs.compute_s(100) == pytest.approx(0.3, rel=0.05)


def test_a_margin_is_never_negative() -> None:
    costs = CostModel(MIB)
    costs.observe_step(0, 8, 1.0)
    assert costs.observe_step(10, 8, 0.5) > 0.0


def test_a_swap_pays_for_new_blocks_once_behind_the_queue_and_for_all_on_return() -> None:
    costs = CostModel(MIB, Rates(100.0, written_bytes=10 * MIB, read_bytes=20 * MIB))
    assert costs.swap_s(new_blocks=5, blocks=10, block_tokens=16) == pytest.approx(0.5 + 0.5)
    assert costs.swap_s(
        new_blocks=5, blocks=10, block_tokens=16, queued_saves=5, queued_restores=20
    ) == pytest.approx(1.0 + 1.0 + 0.5)
    assert costs.swap_s(new_blocks=0, blocks=10, block_tokens=16) == pytest.approx(0.5)


def test_copies_are_learnt_from() -> None:
    costs = CostModel(MIB)
    for _ in range(50):
        costs.observe_write(16, 1.0)
        costs.observe_read(16, 2.0)
    assert costs.swap_s(new_blocks=16, blocks=16, block_tokens=1) == pytest.approx(3.0, rel=0.01)


def test_what_copies_lose_is_computed_with_as_much_that_came_behind_it() -> None:
    costs = CostModel(MIB, Rates(100.0, written_bytes=10 * MIB, read_bytes=10 * MIB))
    sound_s = costs.swap_s(new_blocks=5, blocks=10, block_tokens=16)
    for _ in range(50):
        costs.observe_write(19, 1.9, lost=1)
        costs.observe_read(9, 0.9, lost=1)
    lost = 2 * (0.05 * 5 + 0.1 * 10)
    swap_s = costs.swap_s(new_blocks=5, blocks=10, block_tokens=16)
    assert swap_s - sound_s == pytest.approx(costs.compute_s(16 * lost), rel=0.01)
    for _ in range(50):
        costs.observe_read(0, 0.0, lost=10)
    swap_s = costs.swap_s(new_blocks=5, blocks=10, block_tokens=16)
    assert swap_s - sound_s == pytest.approx(costs.compute_s(16 * 10)), "no more than all"


BLOCK_TOKENS = 64
COMPUTE_S = 0.064
"""Of a block at 1,000 tokens a second."""


def copying(write_s: float, read_s: float) -> CostModel:
    """A model whose copies of a block take so long."""
    return CostModel(MIB, Rates(1000.0, MIB / write_s, MIB / read_s))


@pytest.mark.parametrize(
    ("write_s", "read_s", "spills", "restores"),
    [
        (0.01, 0.05, True, True),
        (0.02, 0.05, False, True),
        (0.01, 0.07, False, False),
        (0.07, 0.01, False, True),
    ],
)
def test_copies_pay_where_they_cost_less_than_computing(
    write_s: float, read_s: float, spills: bool, restores: bool
) -> None:
    costs = copying(write_s, read_s)
    assert costs.pays_to_spill(BLOCK_TOKENS) is spills
    assert costs.pays_to_restore(BLOCK_TOKENS) is restores


def test_copies_pay_on_a_modest_machine_of_which_nothing_is_known() -> None:
    """The embedded model's blocks, and those of one of 70 billion weights."""
    for token_bytes in (23_040, 327_680):
        costs = CostModel(BLOCK_TOKENS * token_bytes)
        assert costs.pays_to_spill(BLOCK_TOKENS)
        assert costs.pays_to_restore(BLOCK_TOKENS)


def test_copies_that_fail_do_not_pay() -> None:
    costs = copying(0.001, 0.001)
    costs.observe_write(0, 0.0, lost=20)
    assert (costs.pays_to_spill(BLOCK_TOKENS), costs.pays_to_restore(BLOCK_TOKENS)) == (False, True)
    costs = copying(0.001, 0.001)
    costs.observe_read(0, 0.0, lost=20)
    assert (costs.pays_to_spill(BLOCK_TOKENS), costs.pays_to_restore(BLOCK_TOKENS)) == (
        False,
        False,
    )


def test_a_bad_spell_does_not_forbid_copies_for_ever() -> None:
    """Nobody copies any more, so that nothing better is measured either."""
    for spoil in (
        lambda costs: costs.observe_read(100, 100 * 0.2),
        lambda costs: costs.observe_read(0, 0.0, lost=100),
    ):
        costs = copying(0.01, 0.01)
        spoil(costs)
        paid = []
        for _ in range(60):
            paid.append(costs.pays_to_restore(BLOCK_TOKENS))
            costs.observe_step(0, 8, 60.0)
        assert not any(paid[:5])
        assert all(paid[40:])


def test_what_is_measured_all_the_time_is_believed_all_the_time() -> None:
    costs = copying(0.01, 0.01)
    for _ in range(100):
        costs.observe_read(100, 100 * 0.2)
        costs.observe_step(0, 8, 60.0)
        assert not costs.pays_to_restore(BLOCK_TOKENS)
