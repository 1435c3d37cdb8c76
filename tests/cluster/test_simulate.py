"""`quire simulate`: its table, its JSON, its picture, and how it refuses."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from cluster.recording import TraceRecorder
from replicas.core.sampling_params import SamplingParams
from replicas.protocol import GenerateRequest
from router.simulator.simulation import Simulation

POLICIES = ["prefix_aware", "round_robin", "power_of_two"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve requests of three prefixes, as many as 4096 tokens each."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 2000 * n,
            "input_length": 4096,
            "output_length": 4,
            "hash_ids": [100 * (n % 3) + i for i in range(7)] + [1000 + n],
        }
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def results(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["simulate", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "", "quiet where nobody watches"
    parsed: list[dict[str, Any]] = json.loads(out)
    return parsed


def test_json_has_one_object_a_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = results(
        capsys, "--trace", str(trace), "--replicas", "2", "--compare", ",".join(POLICIES)
    )
    assert [each["policy"] for each in found] == POLICIES
    for each in found:
        assert each["requests"] == 12
        assert each["output_tokens"] == 48
        assert set(each["ttft_s"]) == {"mean", "p50", "p90", "p99"}
        assert each["run"]["kv_tokens"] > 400_000
        assert each["run"]["gpus_a_replica"] == 1
    aware, turns, _ = found
    assert aware["device_hit_rate"] == pytest.approx(9 / 12 * 7 / 8)
    assert turns["device_hit_rate"] < aware["device_hit_rate"]


def test_results_are_the_same_each_time(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def once(seed: str) -> list[dict[str, Any]]:
        arguments = ("--trace", str(trace), "--replicas", "3", "--policy", "power_of_two")
        found = results(capsys, *arguments, "--seed", seed)
        for each in found:
            del each["wall_s"]
        return found

    assert once("1") == once("1")


def test_options_reach_the_replicas(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--trace", str(trace), "--replicas", "1", "--gpu", "a100", "--kv-tokens", "8192")
    (found,) = results(
        capsys, *arguments, "--limit-requests", "9", "--speed", "2", "--swap-space", "4"
    )
    run = found["run"]
    assert (run["requests"], run["duration_s"], run["speed"]) == (9, 8.0, 2.0)
    assert (run["gpu"], run["kv_tokens"], run["host_tokens"]) == ("a100", 8192, 64 * 512)
    assert found["policy"] == "prefix_aware"
    assert found["host_hit_rate"] > 0.3


def test_a_model_too_large_for_one_gpu_says_how_many_it_takes(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["simulate", "--trace", str(trace), "--replicas", "1", "--model", "llama-3.1-70b"])
        == 0
    )
    assert "1 replica: llama-3.1-70b on 4 x h100" in capsys.readouterr().out


def test_the_table_has_a_column_a_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--trace", str(trace), "--replicas", "2", "--ttft-limit", "0.25"]
    assert main([*arguments, "--compare", "round_robin,prefix_aware"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{trace}: 12 requests, 49,152 prompt and 48 output tokens")
    assert lines[1].startswith("2 replicas: llama-3.1-8b on 1 x h100, KV pool of 4")
    assert lines[3].split() == ["round_robin", "prefix_aware"]
    rows = {line[:24].strip(): line for line in lines[4:]}
    assert rows["hit rate, device"].split()[-1] == "65.6%"
    assert any("goodput, requests/s (TTFT <= 0.25 s, ITL <= 0.1 s)" in line for line in lines)


def test_progress_is_shown_on_a_terminal(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["simulate", "--trace", str(trace), "--replicas", "2"]) == 0
    err = capsys.readouterr().err
    assert "quire: prefix_aware: 50 % of 12 requests" in err
    assert "\n" not in err
    assert err.endswith("\r\x1b[K"), "nothing is left on the line"


def test_interrupting_it_leaves_no_traceback(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "run", interrupted)
    assert main(["simulate", "--trace", str(trace), "--replicas", "1"]) == 1
    assert capsys.readouterr().err.endswith("quire: interrupted\n")


def test_our_own_recording_can_be_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = TraceRecorder(tmp_path, max_mib=1.0, started_at=0.0)
    for n in range(6):
        prompt = (*range(2048), n)
        sampling = SamplingParams(max_tokens=9, seed=n)
        recorder.note(GenerateRequest(str(n), prompt, sampling), 5, arrived_at=10.0 * n)
    recorder.close()
    (found,) = results(capsys, "--trace", str(recorder.path), "--replicas", "2")
    assert (found["requests"], found["output_tokens"]) == (6, 30)
    assert found["device_hit_rate"] == pytest.approx(5 * 2048 / (6 * 2049))


def test_a_bad_line_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trace.open("a") as file:
        file.write('{"timestamp": 0}\n')
    assert main(["simulate", "--trace", str(trace), "--replicas", "2"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"quire: --trace: {trace}:13: input_length: nothing is refused; "
        "allowed: an integer from 1 upwards\n"
    )


def test_what_does_not_fit_together_is_refused(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", "--trace", str(trace), "--replicas", "2"]
    assert main([*arguments, "--max-num-batched-tokens", "8"]) == 2
    assert "--max-num-batched-tokens: 8 is refused; allowed: --max-num-seqs (256)" in (
        capsys.readouterr().err
    )
    assert main([*arguments, "--kv-tokens", "511"]) == 2
    assert "--kv-tokens: 511 is refused; allowed: a block of 512" in capsys.readouterr().err


def test_a_picture_needs_matplotlib(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = trace.with_suffix(".png")
    assert main(["simulate", "--trace", str(trace), "--replicas", "2", "--plot", str(picture)]) == 2
    out, err = capsys.readouterr()
    assert out == "", "refused before anything is simulated"
    assert "pip install 'quire[plot]'" in err


class FakeAxes:
    """Takes what is drawn."""

    def __init__(self) -> None:
        self.bars: list[list[float]] = []

    def bar(self, names: list[str], heights: list[float], **_: object) -> None:
        assert names == POLICIES[:2]
        self.bars.append(heights)

    def legend(self) -> None:
        pass

    def set_title(self, title: str) -> None:
        assert title


class FakeFigure:
    """Stands in for matplotlib's."""

    def __init__(self, **_: object) -> None:
        self.axes = [FakeAxes() for _ in range(4)]

    def subplots(self, rows: int, columns: int) -> list[list[FakeAxes]]:
        assert (rows, columns) == (2, 2)
        return [self.axes[:2], self.axes[2:]]

    def savefig(self, path: Path) -> None:
        path.write_text(json.dumps([axes.bars for axes in self.axes]))


def test_the_picture_shows_every_policy(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("matplotlib.figure")
    module.Figure = FakeFigure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    assert importlib.import_module("matplotlib.figure") is module
    picture = trace.with_suffix(".png")
    arguments = ("--trace", str(trace), "--replicas", "2", "--plot", str(picture))
    found = results(capsys, *arguments, "--compare", ",".join(POLICIES[:2]))
    hits, ttft, goodput, imbalance = json.loads(picture.read_text())
    assert hits[0] == [100 * each["device_hit_rate"] for each in found]
    assert ttft == [[each["ttft_s"][part] for each in found] for part in ("p99", "p90", "p50")]
    assert goodput == [[each["goodput_rps"] for each in found]]
    assert imbalance == [[each["imbalance"] for each in found]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--trace"),
        (["--trace", "t"], "--replicas"),
        (["--trace", "t", "--replicas", "0"], "argument --replicas: '0' is refused; allowed: an"),
        (["--trace", "t", "--replicas", "many"], "an integer from 1 to 10000"),
        (["--policy", "fastest"], "argument --policy: 'fastest' is refused; allowed: one of round"),
        (["--compare", "round_robin,x"], "argument --compare: 'x' is refused; allowed: one of"),
        (["--compare", "round_robin,round_robin"], "allowed: each policy once"),
        (["--policy", "round_robin", "--compare", "round_robin"], "not allowed with argument"),
        (["--speed", "0"], "argument --speed: '0' is refused; allowed: a number above 0"),
        (["--speed", "nan"], "argument --speed: 'nan' is refused"),
        (["--swap-space", "-1"], "argument --swap-space: '-1' is refused; allowed: a number from"),
        (["--model", "gpt"], "argument --model: invalid choice: 'gpt'"),
        (["--gpu", "b200"], "argument --gpu: invalid choice: 'b200'"),
        (["--seed", "x"], "argument --seed: 'x' is refused"),
        (["--limit-requests", "0"], "argument --limit-requests: '0' is refused"),
        (["--plot", "out.txt"], "argument --plot: 'out.txt' is refused; allowed: a file that ends"),
        (["--plot", "no/where.png"], "a file in a folder that exists, which 'no' does not"),
        (["--ttft-limit", "0"], "argument --ttft-limit: '0' is refused"),
    ],
)
def test_a_wrong_option_is_named(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
