"""What a decoding step is expected to take."""

from __future__ import annotations

import random

import pytest

from replicas.core.step_time import StepTime


def line(choices: int) -> float:
    return 0.05 + 0.004 * choices


def test_nothing_is_known_before_the_first_step() -> None:
    time = StepTime()
    assert (time.seconds, time.per_choice, time.of(8)) == (0.0, 0.0, 0.0)


def test_batches_that_differ_show_what_a_choice_adds() -> None:
    time, draw = StepTime(), random.Random(1)
    for _ in range(400):
        choices = draw.randint(1, 40)
        time.observe(choices, line(choices) * draw.uniform(0.9, 1.1))
    assert time.per_choice == pytest.approx(0.004, rel=0.2)
    assert time.of(60) == pytest.approx(line(60), rel=0.2)


def test_batches_of_one_size_leave_the_prior() -> None:
    time = StepTime()
    for _ in range(50):
        time.observe(16, 0.08)
    assert time.per_choice == pytest.approx(0.08 / 80)
    assert time.of(16) == pytest.approx(0.08)
    assert time.seconds == pytest.approx(0.08)


def test_what_was_measured_outlives_batches_of_one_size() -> None:
    time = StepTime.measured(line(1), 8, line(8))
    for _ in range(500):
        time.observe(10, line(10))
    assert time.per_choice == pytest.approx(0.004)
    assert time.of(10) == pytest.approx(line(10))
    assert time.of(30) == pytest.approx(line(30))


def test_it_follows_a_machine_that_becomes_slower() -> None:
    time = StepTime()
    for factor in (1.0, 3.0):
        for step in range(300):
            time.observe(1 + step % 20, factor * line(1 + step % 20))
    assert time.per_choice == pytest.approx(0.012, rel=0.1)
    assert time.of(10) == pytest.approx(3 * line(10), rel=0.1)


def test_what_a_choice_adds_is_never_negative() -> None:
    time = StepTime()
    for choices, seconds in ((1, 0.9), (20, 0.1)) * 20:
        time.observe(choices, seconds)
        assert time.per_choice >= 0.0
    assert time.per_choice == 0.0
    assert StepTime.measured(0.5, 8, 0.4).per_choice == 0.0
