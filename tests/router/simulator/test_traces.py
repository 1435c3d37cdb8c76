"""Trace readers: what they make of a file, and how they name a mistake in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.simulator import trace_file
from router.simulator.trace import TraceError, TraceRequest

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def line(**changes: object) -> str:
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    return json.dumps({k: v for k, v in (row | changes).items() if v is not ...}) + "\n"


def test_mooncake_is_read_in_order_of_time(tmp_path: Path) -> None:
    text = line(timestamp=2500, hash_ids=[7, 2**60]) + "\n" + line(hash_ids=[7, 9], extra=1)
    trace = trace_file.read(write(tmp_path, text))
    assert trace.block_size == 512
    assert trace.requests == (
        TraceRequest(0.0, 600, 5, (0, 2)),
        TraceRequest(2.5, 600, 5, (0, 1)),
    ), "ids are numbered by first appearance, whatever their size"
    assert (trace.duration_s, trace.num_prompt_tokens, trace.num_output_tokens) == (2.5, 1200, 10)


def test_another_block_size_can_be_stated(tmp_path: Path) -> None:
    path = write(tmp_path, line(input_length=30, hash_ids=[0, 1]))
    assert trace_file.read(path, 16).block_size == 16
    with pytest.raises(TraceError, match=r"hash_ids: 2 ids .* allowed: 1, .* --block-size"):
        trace_file.read(path)


def test_an_output_has_a_token_at_least(tmp_path: Path) -> None:
    (request,) = trace_file.read(write(tmp_path, line(output_length=0))).requests
    assert request.num_output_tokens == 1


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "is no JSON"),
        ("[1]\n", "is no JSON object"),
        (line(timestamp=...), "timestamp: nothing is refused; allowed: milliseconds from 0"),
        (line(timestamp=-1), "timestamp: -1 is refused"),
        (line(timestamp="1"), "timestamp: '1' is refused"),
        (line(timestamp=True), "timestamp: True is refused"),
        (line(input_length=0), "input_length: 0 is refused; allowed: an integer from 1 upwards"),
        (line(input_length=600.0), "input_length: 600.0 is refused"),
        (line(output_length=-1), "output_length: -1 is refused"),
        (line(output_length=None), "output_length: nothing is refused"),
        (line(hash_ids=...), "hash_ids: nothing is refused; allowed: a list of integers"),
        (line(hash_ids=["a"]), "hash_ids: ['a'] is refused"),
        (line(hash_ids=[1]), "hash_ids: 1 ids for input_length 600 are refused; allowed: 2"),
    ],
)
def test_a_bad_mooncake_line_is_named(tmp_path: Path, bad: str, says: str) -> None:
    path = write(tmp_path, line() + "\n" + bad)
    with pytest.raises(TraceError) as raised:
        trace_file.read(path)
    assert str(raised.value).startswith(f"{path}:3: {says}")


def test_azure_is_read_without_sharing(tmp_path: Path) -> None:
    text = HEADER + "2023-11-16 18:17:04.0319600,70,8\n2023-11-16 18:17:03.0319600,64,0\n"
    trace = trace_file.read(write(tmp_path, text))
    assert trace.block_size == 64
    first, second = trace.requests
    assert (first.arrived_s, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 64, 1)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (70, 8)
    assert second.arrived_s == pytest.approx(1.0)
    blocks = [*first.blocks, *second.blocks]
    assert len(blocks) == len(set(blocks)) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("TIMESTAMP,ContextTokens\n", "1: lacks GeneratedTokens; expected: TIMESTAMP,"),
        (HEADER + "yesterday,1,1\n", "2: TIMESTAMP: 'yesterday' is refused; allowed: a time"),
        (HEADER + "2023-11-16 18:17:03,x,1\n", "2: ContextTokens: 'x' is refused; allowed: an"),
        (HEADER + "2023-11-16 18:17:03,0,1\n", "2: ContextTokens: '0' is refused"),
        (HEADER + "2023-11-16 18:17:03,1\n", "2: GeneratedTokens: '' is refused"),
        (HEADER, " holds no request"),
        ("", "1: lacks TIMESTAMP, ContextTokens, GeneratedTokens"),
    ],
)
def test_a_bad_azure_line_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as raised:
        trace_file.read(path)
    assert str(raised.value).startswith(f"{path}:{says}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nothing: cannot be read: No such file"):
        trace_file.read(tmp_path / "nothing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="binary: cannot be read: is no text"):
        trace_file.read(tmp_path / "binary")


def test_tokens_are_equal_where_blocks_are(tmp_path: Path) -> None:
    request = TraceRequest(0.0, 10, 1, (3, 9, 4))
    assert request.prompt_token_ids(4) == (3, 3, 3, 3, 9, 9, 9, 9, 4, 4)


def test_a_trace_can_be_cut_and_sped_up(tmp_path: Path) -> None:
    text = "".join(line(timestamp=1000 * at) for at in range(4))
    trace = trace_file.read(write(tmp_path, text)).first(3).faster(2.0)
    assert [request.arrived_s for request in trace.requests] == [0.0, 0.5, 1.0]
