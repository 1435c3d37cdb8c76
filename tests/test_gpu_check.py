"""The check for GPUs, as far as it needs none: deadlines, judgement, table, references."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.attention_batch import Segment
from kernels.reference import paged_attention_reference
from tests.gpu_check import oracle, plan, records, shapes, table
from tests.gpu_check.accuracy import Worst
from tests.gpu_check.records import End, Fact, Peer, Recorder, Row
from tests.gpu_check.results import Results, SectionResult
from tests.gpu_check.rig import Rig, UnavailableError
from tests.gpu_check.runner import Section, run_all, run_one
from tests.gpu_check.sections.peer_generate_batch import decoding_rate
from tests.gpu_check.targets import NOTHING, Target, checked, exact, rate, timed

ROOT = Path(__file__).parents[1]


def _row(rig: Rig, item: str = "thing") -> None:
    rig.recorder.add(exact(item, 0, 3))


def _hang(rig: Rig) -> None:
    _row(rig)
    child = subprocess.Popen(["sleep", "60"])
    rig.fact("grandchild", child.pid)
    time.sleep(60)


def _raise(rig: Rig) -> None:
    _row(rig)
    raise ValueError("no such luck")


def _die(rig: Rig) -> None:
    _row(rig)
    os.kill(os.getpid(), signal.SIGKILL)


def _lack(rig: Rig) -> None:
    raise UnavailableError("xyz is not installed")


def _import(rig: Rig) -> None:
    _row(rig)
    importlib.import_module("absent_package.part")


@pytest.mark.parametrize(
    ("run", "status", "detail"),
    [
        (_row, "ok", ""),
        (_hang, "overran", "its deadline was 1 s"),
        (_raise, "failed", "ValueError: no such luck"),
        (_die, "crashed", "killed by SIGKILL"),
        (_lack, "not available", "xyz is not installed"),
        (_import, "not available", "absent_package is not installed"),
    ],
)
def test_a_section_may_do_what_it_likes(
    tmp_path: Path, run: Callable[[Rig], None], status: str, detail: str
) -> None:
    begin = time.monotonic()
    seconds = 1.0 if run is _hang else 30.0
    result = run_one(Section("any thing", run, 99.0, ("thing",)), Rig(dry=True), tmp_path, seconds)
    assert (result.status, result.detail) == (status, detail)
    assert time.monotonic() - begin < 20
    assert [row.item for row in result.rows] == ([] if run is _lack else ["thing"])
    assert result.fine == (run is _row)
    if run is _raise:
        assert "Traceback" in (tmp_path / "any-thing.log").read_text()
    if run is _hang:
        grandchild = next(r.value for r in result.records if isinstance(r, Fact))
        assert _gone(grandchild), "what a section starts ends with it"


def _gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_without_pydantic_the_kernels_are_checked_all_the_same(tmp_path: Path) -> None:
    """Only the engine is configured by it."""
    missing = "raise ModuleNotFoundError(\"No module named 'pydantic'\", name='pydantic')"
    (tmp_path / "pydantic.py").write_text(missing)
    chosen = ("--only", "right: graphs", "--only", "fast: swap")
    done = _check("--dry", "--out", str(tmp_path), *chosen, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.stderr
    written = json.loads((tmp_path / "results.json").read_text())["sections"]
    found = {section["name"]: section for section in written}
    assert found["environment"]["status"] == "ok"
    for name in ("right: graphs", "fast: swap"):
        section = found[name]
        assert (section["status"], section["detail"]) == (
            "not available",
            "pydantic is not installed",
        )
    rows = [r["item"] for r in found["right: graphs"]["records"] if r["kind"] == "Row"]
    assert rows == ["attention replay equals eager"]
    assert "FAIL: fast: swap not available" in done.stdout


def test_a_batch_decodes_while_all_of_it_does() -> None:
    times = [[0.0, 1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5], [1.0, 2.0, 3.0]]
    # From 1.5 to 3.0: 2.0, 3.0; 2.5; 2.0, 3.0.
    assert decoding_rate(times) == pytest.approx(5 / 1.5)
    with pytest.raises(ValueError, match="at no time"):
        decoding_rate([[0.0, 1.0], [1.0, 2.0]])


def test_results_are_on_disk_after_each_section(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def measure(rig: Rig) -> None:
        rig.fact("copy, bytes/s", 4e12)

    def use(rig: Rig) -> None:
        floor = rig.floor_s("copy, bytes/s", 4e6)
        rig.recorder.add(timed("copy", 2e-6, floor, Target(share=0.4), dry=False))

    def tell(result: SectionResult) -> None:
        written = json.loads((tmp_path / "results.json").read_text())
        seen.append([f"{s['name']} {s['status']}" for s in written["sections"]])

    sections = [
        Section("first", measure, 30),
        Section("second", _raise, 30, ("thing", "other")),
        Section("third", use, 30, ("copy",)),
        Section("late", _row, 1.0),
    ]
    results = run_all(sections, Rig(dry=False), tmp_path, 90, tell)
    assert seen[0] == ["first ok"]
    assert seen[1] == ["first ok", "second failed"]
    assert seen[-1] == ["first ok", "second failed", "third ok", "late no time left"]
    row = results.sections[2].rows[0]
    assert (row.figure, row.floor, row.share, row.passed) == (2.0, 1.0, 0.5, True)
    assert results.sections[1].missing == ["other"]
    assert not results.fine
    assert "FAIL: second failed" in table.render(results)


def test_the_worst_case_is_the_closest_to_its_limit_and_nan_beats_all() -> None:
    worst, one = Worst(), torch.ones(4, dtype=torch.float64)
    worst.see(one + 1e-3, one, torch.bfloat16, "fifth of the limit")
    worst.see(one + 5e-4, one, torch.float16, "half of it")
    assert worst.row("a").note == "worst of 2: half of it"
    assert worst.row("a").passed is True
    worst.see(one * torch.nan, one, torch.float16, "nothing")
    worst.see(one + 0.1, one, torch.float16, "far off")
    assert (worst.row("a").note, worst.row("a").passed) == ("worst of 4: nothing", False)
    assert Worst().row("a").passed is False, "no case, no pass"
    broken = Worst()
    broken.see(one, one, torch.float16, "exact")
    broken.demand(False, "wrote elsewhere")
    assert broken.row("a").passed is False


def test_half_a_line_is_no_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "records")
    for record in (Fact("speed", 3.5), Peer("a", "b", None, problem="not installed"), End("ok")):
        recorder.add(record)
    whole = records.read(tmp_path / "records")
    assert whole == [Fact("speed", 3.5), Peer("a", "b", None, problem="not installed"), End("ok")]
    text = (tmp_path / "records").read_text()
    (tmp_path / "records").write_text(text[:-9])
    assert records.read(tmp_path / "records") == whole[:-1]
    assert records.read(tmp_path / "nothing") == []


def test_rows_are_judged_by_share_or_by_figure() -> None:
    share = Target(share=0.85, stretch=0.92)
    assert timed("a", 100e-6, 84e-6, share, dry=False).passed is False
    good = timed("a", 100e-6, 85e-6, share, dry=False)
    assert (good.figure, good.floor, good.share, good.passed) == pytest.approx((100, 85, 0.85, 1))
    assert good.target == ">= 85% (92%)"
    assert timed("a", 100e-6, None, share, dry=False).passed is False, "no ceiling, no pass"
    assert timed("a", 100e-6, 85e-6, share, dry=True).passed is None
    few = Target(at_most=12.0)
    assert timed("a", 12e-6, None, few, dry=False).passed is True
    assert timed("a", 12.1e-6, None, few, dry=False).passed is False
    assert timed("a", 12e-6, None, NOTHING, dry=False).passed is None
    assert rate("a", 45.0, "GB/s", 50.0, Target(share=0.9), dry=False).passed is True
    assert rate("a", 44.9, "GB/s", 50.0, Target(share=0.9), dry=False).passed is False
    assert checked("a", float("nan"), 5e-3, note="").passed is False
    assert checked("a", 4e-3, 5e-3, note="").passed is True
    assert checked("a", 4e-3, 5e-3, passed=False, note="").passed is False
    assert exact("a", 0, 0).passed is False, "what checked nothing shows nothing"
    assert exact("a", 1, 9).passed is False


def test_the_table_names_the_best_peer_of_each_item() -> None:
    fast = timed("decode", 100e-6, 80e-6, Target(share=0.9), dry=False)
    speed = rate("serving", 50.0, "tok/s", 100.0, Target(share=0.4), dry=False)
    peers = (
        Peer("decode", "slow", 300.0, 100.0),
        Peer("decode", "quick", 150.0, 120.0),
        Peer("decode", "absent", None, problem="not installed"),
        Peer("serving", "other", 40.0),
    )
    ours = SectionResult("ours", "ok", 1.0, "", (Fact("device", "H200"), fast, speed))
    theirs = SectionResult("theirs", "crashed", 1.0, "killed", peers, peer=True)
    results = Results(False, [ours, theirs])
    lines = table.render(results).splitlines()
    cells = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
    decode = [cell.strip() for cell in cells["decode"].split("|")[2:-1]]
    assert decode == ["100 us", "80", "80%", ">= 90%", "quick 150", "1.25x", "FAIL"]
    serving = [cell.strip() for cell in cells["serving"].split("|")[2:-1]]
    assert serving == ["50 tok/s", "100", "50%", ">= 40%", "other 40", "1.25x", "pass"]
    assert "device: H200" in lines
    assert table.line_of(ours) == "ours: ok in 1.0 s; 1 failed"
    assert table.line_of(theirs) == "theirs: crashed in 1.0 s: killed"
    assert "absent, decode: not installed" in lines
    assert lines[-1] == "2 judged, 1 failed, 0 missing"
    assert not results.fine
    assert Results(False, [SectionResult("ours", "ok", 1.0, "", (speed,)), theirs]).fine
    assert not SectionResult("ours", "ok", 1.0, "", (speed,), ("serving", "another")).fine


def test_every_target_of_the_kernels_is_in_the_plan() -> None:
    asked = [item for section in plan.SECTIONS for item in section.items]
    assert len(asked) == len(set(asked))
    judged = [s for s in (*shapes.DECODES, *shapes.PREFILLS) if s.target != NOTHING]
    assert len(judged) == 16
    assert {s.item for s in judged} <= set(asked)
    assert set(shapes.elementwise_targets()) <= set(asked)
    eight = shapes.HEADS_8B
    floors = {d.item: d.kv_bytes(eight) / 4.3e12 * 1e6 for d in shapes.DECODES}
    assert floors["decode B64 x 4k"] == pytest.approx(249.7, abs=0.1)
    assert floors["decode fp8 B8 x 32k"] == pytest.approx(124.9, abs=0.1)
    assert floors["decode B1 x 128k"] == pytest.approx(124.9, abs=0.1)
    assert floors["decode B1 x 4k"] == pytest.approx(3.9, abs=0.1)
    floors = {p.item: p.operations(eight) / 790e12 * 1e6 for p in shapes.PREFILLS}
    assert list(floors.values()) == pytest.approx([43.5, 696, 46.2, 1348], rel=2e-3)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_both_oracles_agree(window: int | None, soft_cap: float | None, sinks: bool) -> None:
    torch.manual_seed(0)
    start, length, heads, kv_heads, dim, size = 9, 7, 6, 2, 8, 4
    query = torch.randn(length, heads, dim)
    keys, values = torch.randn(2, start + length, kv_heads, dim)
    blocks = torch.zeros(2, 1 + 4, kv_heads, size, dim)
    for position in range(start):
        for part, content in enumerate((keys, values)):
            blocks[part, 1 + position // size, :, position % size] = content[position]
    logits = torch.randn(heads) if sinks else None
    options = {"scale": 0.4, "window": window, "soft_cap": soft_cap, "sinks": logits}
    expected = paged_attention_reference(
        query,
        keys[start:],
        values[start:],
        *blocks,
        [Segment(start, length, (1, 2, 3, 4))],
        **options,
    )
    found = oracle.attention(query, keys, values, start, **options)
    assert oracle.relative_error(found, expected) < 1e-12


def test_without_a_gpu_it_says_so_in_a_line() -> None:
    done = _check(env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert done.stdout.startswith("gpu-check: no GPU: torch ")
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_fills_the_table(tmp_path: Path) -> None:
    """Every section of the script runs, on shapes for the interpreter."""
    command = ["make", "gpu-check", "DRY=1", f"PYTHON={sys.executable}", f"ARGS=--out {tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    absent = {"peer: xformers", "peer: flashinfer"}
    for section, planned in zip(results["sections"], plan.SECTIONS, strict=True):
        allowed = ("ok", "not available") if planned.name in absent else ("ok",)
        assert section["status"] in allowed, section["name"]
        rows = {r["item"]: Row(**_fields(r)) for r in section["records"] if r["kind"] == "Row"}
        assert rows.keys() == set(planned.items)
        for row in rows.values():
            assert f"| {row.item}" in done.stdout
            judged = row.unit in ("rel. error", "wrong", "std") or row.target == "< 1.5"
            assert row.passed is (True if judged else None), row
    peers = [r for s in results["sections"] for r in s["records"] if r["kind"] == "Peer"]
    assert {p["name"] for p in peers} >= {"torch SDPA", "flex_attention", "generate_batch"}
    assert not [p for p in peers if p["problem"]]
    assert "the timings mean nothing" in done.stdout


def _fields(record: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in record.items() if name != "kind"}


def _check(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu_check", *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
