"""Stop strings: nothing of one is let through, and nothing else is held for good."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.openai.stop import StopMatcher


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    text = "".join(matcher.feed(piece) for piece in pieces) + matcher.flush()
    return text, matcher.matched


def naive(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The first end of any stop string; the longest of those that end there."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


TEXTS = st.text(alphabet="abü🌶", max_size=40)
STOPS = st.lists(st.text(alphabet="abü🌶", min_size=1, max_size=5), max_size=4, unique=True)


@given(text=TEXTS, stops=STOPS, include=st.booleans(), data=st.data())
def test_agrees_with_a_naive_search_however_the_text_is_cut(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert run(pieces, stops, include=include) == naive(text, stops, include=include)


@given(text=TEXTS, stops=STOPS)
def test_holds_back_no_more_than_what_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for position, character in enumerate(text, 1):
        shown += matcher.feed(character)
        if matcher.matched is not None:
            break
        held = text[len(shown) : position]
        assert text.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (["one tw", "o th", "ree"], ["two three"], "one ", "two three"),
        (["a", "b", "c"], ["ab", "abc"], "", "ab"),
        (["ab", "ac", "d"], ["abad"], "abacd", None),
        (["aab", "x"], ["ab"], "a", "ab"),
        (["x\U0001f336", "\ufe0fy"], ["\U0001f336\ufe0f"], "x", "\U0001f336\ufe0f"),
        (["abc"], ["bc", "abc"], "", "abc"),
        (["held to the end: sto"], ["stop"], "held to the end: sto", None),
    ],
)
def test_known_cases(pieces: list[str], stops: list[str], text: str, matched: str | None) -> None:
    assert run(pieces, stops) == (text, matched)


def test_the_stop_string_itself_can_be_let_through() -> None:
    assert run(["a st", "op b"], ["stop"], include=True) == ("a stop", "stop")


def test_work_is_linear_in_the_text_for_hostile_stop_strings() -> None:
    matcher = StopMatcher(["a" * 255 + "b"] * 16)
    shown = sum(len(matcher.feed("a" * 100)) for _ in range(50))
    assert shown == 50 * 100 - 255
