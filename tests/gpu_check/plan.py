"""The sections, in order, and what each must deliver. Deadlines are for one H200 or H100."""

from __future__ import annotations

from collections.abc import Sequence

from tests.gpu_check.items import (
    ATTENTION_CHECKS,
    CEILINGS,
    COMPILED,
    ELEMENTWISE_CHECKS,
    ENGINE_SPEED,
    GRAPH_CHECKS,
    GREEDY,
    SAMPLE_CHECKS,
    SWAP,
)
from tests.gpu_check.runner import Section, in_module
from tests.gpu_check.shapes import DECODES, PREFILLS, elementwise_targets

SECTIONS = (
    Section("environment", in_module("environment"), 40, CEILINGS),
    Section("compile", in_module("compiling"), 120, COMPILED),
    Section("right: elementwise", in_module("elementwise_right"), 30, ELEMENTWISE_CHECKS),
    Section("right: attention", in_module("attention_right"), 50, ATTENTION_CHECKS),
    Section("right: sampling", in_module("sampling_right"), 40, SAMPLE_CHECKS),
    Section("right: graphs", in_module("graphs_right"), 60, GRAPH_CHECKS),
    Section("right: greedy", in_module("greedy_right"), 90, GREEDY),
    Section("fast: decode", in_module("decode_fast"), 50, tuple(d.item for d in DECODES)),
    Section("fast: prefill", in_module("prefill_fast"), 30, tuple(p.item for p in PREFILLS)),
    Section("fast: others", in_module("elementwise_fast"), 40, tuple(elementwise_targets())),
    Section("fast: engine", in_module("engine_fast"), 80, ENGINE_SPEED),
    Section("fast: swap", in_module("swap_fast"), 70, SWAP),
    Section("peer: xformers", in_module("peer_xformers"), 30, peer=True),
    Section("peer: generate_batch", in_module("peer_generate_batch"), 60, peer=True),
    Section("peer: flex_attention", in_module("peer_flex"), 70, peer=True),
    Section("peer: flashinfer", in_module("peer_flashinfer"), 150, peer=True),
)


def names() -> tuple[str, ...]:
    return tuple(section.name for section in SECTIONS)


def chosen(only: Sequence[str]) -> list[Section]:
    """All, or those named. What judges shares, the environment, is always among them."""
    wanted = {SECTIONS[0].name, *only} if only else set(names())
    return [section for section in SECTIONS if section.name in wanted]
