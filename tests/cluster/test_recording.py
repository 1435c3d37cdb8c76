"""Recorded traces: what they hold, what they do not, and that they can be replayed."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from cluster import recording
from cluster.recording import BlockNames, TraceRecorder
from replicas.core.sampling_params import SamplingParams
from replicas.protocol import GenerateRequest
from router.simulator import trace_file

SYSTEM = tuple(range(1000, 1512))
"""A block that several prompts begin with."""


def request(*token_ids: int, salt: str = "") -> GenerateRequest:
    sampling = SamplingParams(max_tokens=8, seed=1)
    return GenerateRequest("id of the client", token_ids, sampling, cache_salt=salt)


def rows(recorder: TraceRecorder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in recorder.path.read_text().splitlines()]


def test_a_line_holds_times_lengths_and_block_numbers_alone(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "new", max_mib=1.0, started_at=100.0)
    recorder.note(request(*SYSTEM, 1, 2), 7, arrived_at=101.5)
    recorder.note(request(*SYSTEM, 1, 2, 3), 9, arrived_at=100.25)
    recorder.close()
    assert rows(recorder) == [
        {"timestamp": 1500, "input_length": 514, "output_length": 7, "hash_ids": [0, 1]},
        {"timestamp": 250, "input_length": 515, "output_length": 9, "hash_ids": [0, 2]},
    ]


def test_what_was_recorded_can_be_simulated(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path, max_mib=1.0, started_at=0.0)
    prompts = [(*SYSTEM, *range(count)) for count in (1, 511, 512, 513)] + [(5,)]
    for number, prompt in enumerate(prompts):
        recorder.note(request(*prompt), number, arrived_at=10.0 - number)
    recorder.close()
    trace = trace_file.read(recorder.path)
    assert [each.num_prompt_tokens for each in trace.requests] == [1, 1025, 1024, 1023, 513]
    assert [each.num_output_tokens for each in trace.requests] == [4, 3, 2, 1, 1]
    assert [each.arrived_s for each in trace.requests] == [6.0, 7.0, 8.0, 9.0, 10.0]
    assert len({each.blocks[0] for each in trace.requests[1:]}) == 1


def test_numbers_follow_the_chain_and_the_salt() -> None:
    names, first, other = BlockNames(), SYSTEM, tuple(range(512))
    assert names.of(first + first) == [0, 1], "the same tokens after another prefix"
    assert names.of(first + other) == [0, 2]
    assert names.of(first, "a tenant's salt") == [3]
    assert names.of(first + first) == [0, 1]
    assert names.of(()) == []


def test_a_forgotten_block_gets_a_new_number() -> None:
    names = BlockNames(max_names=2)
    assert [names.of((token,)) for token in (1, 2, 1, 3, 1, 2)] == [[0], [1], [0], [2], [0], [3]]


def test_nothing_can_be_compared_with_a_guess() -> None:
    """Two recorders that saw the same text share no digest."""
    one, two = BlockNames(), BlockNames()
    one.of(SYSTEM)
    two.of(SYSTEM)
    assert not set(one._names) & set(two._names)


def test_recording_ends_at_its_size(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path, max_mib=200 / 2**20, started_at=0.0)
    for _ in range(10):
        recorder.note(request(1), 1, arrived_at=0.0)
    recorder.close()
    recorder.note(request(1), 1, arrived_at=0.0)
    assert 100 < recorder.path.stat().st_size <= 200
    assert len(rows(recorder)) == 2, "whole lines only"


def test_each_recorder_has_a_file_of_its_own(tmp_path: Path) -> None:
    recorders = [TraceRecorder(tmp_path, max_mib=1.0, started_at=0.0) for _ in range(2)]
    for recorder in recorders:
        recorder.close()
        recorder.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_made_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        TraceRecorder(tmp_path / "file" / "below", max_mib=1.0, started_at=0.0)


def test_serving_never_waits_for_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(recording, "MAX_QUEUED", 3)
    monkeypatch.setattr(BlockNames, "of", lambda *_: go_on.wait() and [0])
    recorder = TraceRecorder(tmp_path, max_mib=1.0, started_at=0.0)
    for _ in range(10):
        recorder.note(request(1), 1, arrived_at=0.0)  # returns though nothing can be written
    assert recorder.num_dropped >= 6
    dropped = recorder.num_dropped
    go_on.set()
    recorder.close()
    assert len(rows(recorder)) == 10 - dropped
    assert f"lacks {dropped} requests" in caplog.text


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TraceRecorder, "_line", full)
    recorder = TraceRecorder(tmp_path, max_mib=1.0, started_at=0.0)
    recorder.note(request(1), 1, arrived_at=0.0)
    recorder._thread.join(10.0)
    recorder.note(request(1), 1, arrived_at=0.0)
    recorder.close()
    assert "recording is over" in caplog.text
    assert "No space left" in caplog.text


def test_what_was_written_can_be_read_during_a_pause(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path, max_mib=1.0, started_at=0.0)
    recorder.note(request(1), 1, arrived_at=0.0)
    deadline = threading.Event()
    for _ in range(50):
        if rows(recorder):
            break
        deadline.wait(0.1)
    assert len(rows(recorder)) == 1
    recorder.close()
