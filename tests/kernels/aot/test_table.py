"""The committed table, and the comparison with it."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.kernels.aot import table
from tests.kernels.aot.compiling import Target
from tests.kernels.aot.survey import Survey
from tests.kernels.aot.table import Row
from tests.kernels.aot.test_rules import GOOD, having

HOPPER = Target(90)
ROWS = {"k[]": {"sm_90": Row.of(GOOD)}}


def test_equal_and_smaller_is_no_regression() -> None:
    assert not table.regressions(ROWS, "k[]", HOPPER, GOOD)
    assert not table.regressions(ROWS, "k[]", HOPPER, having(registers=64, instructions=500))


@pytest.mark.parametrize(
    ("name", "slack"),
    [("registers", table.REGISTER_SLACK), ("instructions", 1000 * table.INSTRUCTION_SLACK)],
)
def test_a_little_more_is_put_up_with(name: str, slack: float) -> None:
    most = getattr(GOOD.code, name) + int(slack)
    assert not table.regressions(ROWS, "k[]", HOPPER, having(**{name: most}))
    (found,) = table.regressions(ROWS, "k[]", HOPPER, having(**{name: most + 1}))
    assert name in found


def test_more_shared_memory_or_stack_is_a_regression() -> None:
    larger = replace(GOOD, shared=GOOD.shared + 1)
    assert table.regressions(ROWS, "k[]", HOPPER, larger)
    assert table.regressions(ROWS, "k[]", HOPPER, having(stack=1))


def test_what_the_table_lacks_is_a_regression() -> None:
    assert table.regressions(ROWS, "other[]", HOPPER, GOOD)
    assert table.regressions(ROWS, "k[]", Target(80), GOOD)


def test_versions_stand_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "resources.json"
    assert table.read("3.9.0", path) is None
    table.write("3.9.0", ROWS, path)
    table.write("3.10.0", {}, path)
    assert table.read("3.9.0", path) == ROWS
    assert table.read("3.10.0", path) == {}
    assert table.read("3.11.0", path) is None
    json.loads(path.read_text())


def test_updating_keeps_what_is_listed_still_and_was_not_compiled() -> None:
    row = Row(1, 0, 0, 1)
    before = {"old[]": {"sm_90": row}, "kept[]": {"sm_80": row, "sm_90": row}}
    assert Survey(None).merged(before, {("kept[]", 80)}) == {"kept[]": {"sm_80": row}}


def test_the_committed_table_has_only_listed_variants_and_their_targets() -> None:
    from kernels.variants import TARGETS, identity, variants

    listed = {
        (identity(launch), str(Target(arch, aligned)))
        for arch in TARGETS
        for launch in variants(arch)
        for aligned in (True, False)
    }
    rows = table.read(version("triton"))
    if rows is None:
        pytest.skip(f"the table has nothing of triton {version('triton')}")
    assert {(key, target) for key, targets in rows.items() for target in targets} <= listed
