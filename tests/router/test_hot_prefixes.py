"""Hits a minute: they add up, fade, and do not pile up in memory."""

from __future__ import annotations

import pytest

from router.hot_prefixes import HotPrefixes


def test_a_steady_rate_is_found() -> None:
    hot = HotPrefixes()
    for second in range(600):
        hot.hit(b"p", float(second))
    assert hot.per_minute(b"p", 600.0) == pytest.approx(60, rel=0.02)
    assert hot.per_minute(b"q", 600.0) == 0


def test_hits_fade() -> None:
    hot = HotPrefixes()
    hot.hit(b"p", 0.0)
    assert hot.per_minute(b"p", 0.0) == 1
    assert hot.per_minute(b"p", 300.0) < 0.01


def test_the_one_asked_for_least_recently_goes() -> None:
    hot = HotPrefixes(max_prefixes=2)
    for time, digest in enumerate([b"a", b"b", b"a", b"c"]):
        hot.hit(digest, float(time))
    assert len(hot) == 2
    assert hot.per_minute(b"b", 3.0) == 0
    assert hot.per_minute(b"a", 3.0) > 1
