"""What `make bench-preempt` counts and prints, without a model."""

from __future__ import annotations

from replicas.protocol import FinishReason, Receipt, TokenDelta
from tests.benchmarks.preempt import LOADS, Row, table
from tests.benchmarks.preempt_case import UNCONSTRAINED, Case, Outcome, stalls_of


def outcome(preemptions: int, stalls_s: tuple[float, ...] = ()) -> Outcome:
    return Outcome(
        tokens_per_s=100.0,
        preemptions=preemptions,
        swaps=0,
        recomputed_tokens=0,
        restored_tokens=0,
        stalls_s=stalls_s,
        token_ids=(),
    )


def test_a_stall_is_taken_once_a_choice_in_all() -> None:
    """A choice that waits says so about once a second, and again when it runs."""
    told = [TokenDelta("a", 0, (), receipt=Receipt(preemptions=1, stall_s=0.0)) for _ in range(3)]
    told.append(TokenDelta("a", 0, (5,), receipt=Receipt(preemptions=1, stall_s=4.0)))
    last = Receipt(preemptions=2, stall_s=12.0)
    told.append(TokenDelta("a", 0, (7,), finish_reason=FinishReason.LENGTH, receipt=last))
    told.append(TokenDelta("b", 0, (7,), finish_reason=FinishReason.STOP, receipt=Receipt()))
    assert [stall for delta in told for stall in stalls_of(delta)] == [12.0]


def test_the_table_has_the_fewest_preemptions_of_any_round() -> None:
    free = Row("half", UNCONSTRAINED, (outcome(0), outcome(0)))
    tight = Row("half", Case("auto"), (outcome(41), outcome(29, (1.0, 2.5)), outcome(43)))
    header, _, first, second = table(LOADS[0], [free, tight]).splitlines()[-4:]
    column = header.split(" | ").index("least preemptions")
    assert [line.split(" | ")[column] for line in (first, second)] == ["0", "29"]
    assert second.endswith("| 2.50 |")
