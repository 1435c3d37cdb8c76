"""Predictions follow what has been measured."""

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
    costs = CostModel(MIB, Rates(written_bytes=10 * MIB, read_bytes=20 * MIB))
    assert costs.swap_s(new_blocks=5, blocks=10, queued_blocks=5) == pytest.approx(1.0 + 0.5)
    assert costs.swap_s(new_blocks=0, blocks=10, queued_blocks=0) == pytest.approx(0.5)


def test_copies_are_learnt_from() -> None:
    costs = CostModel(MIB)
    for _ in range(50):
        costs.observe_write(16, 1.0)
        costs.observe_read(16, 2.0)
    assert costs.swap_s(new_blocks=16, blocks=16, queued_blocks=0) == pytest.approx(3.0, rel=0.01)
