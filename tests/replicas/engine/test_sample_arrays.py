"""Sampling parameters as arrays say what the CPU sampler would do."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from replicas.core.sampling_params import SamplingParams
from replicas.engine import noise
from replicas.engine.logit_processors import SampleRow, process
from replicas.engine.sample_arrays import sample_arrays
from tests.replicas.engine.fake_device import allow, edit

VOCAB, EOS = 70, (2, 69)
EDITED = [
    SamplingParams(9, 0, allowed_token_ids=(0, 31, 32, 69, 70, -1), logit_bias=((31, 2.0),)),
    SamplingParams(9, 0),
    SamplingParams(9, 0, min_tokens=3, stop_token_ids=(5,), logit_bias=((5, 9.0), (99, 1.0))),
    SamplingParams(9, 0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.25),
    SamplingParams(9, 0, repetition_penalty=0.5, logit_bias=((4, -9.0), (6, 1.5)), min_tokens=2),
]


def test_edits_do_what_the_processors_do() -> None:
    rows = [
        SampleRow(sampling, 0, 1, prompt_token_ids=(4, 6, 6, 70), output_token_ids=(6, 8, 8, -1))
        for sampling in EDITED
    ]
    arrays = {name: torch.from_numpy(a) for name, a in sample_arrays(rows, VOCAB, EOS).items()}
    expected = torch.randn(len(rows), VOCAB)
    scores = expected.clone()
    process(expected, rows, EOS)
    allow(scores, arrays["allowed_rows"], arrays["allowed_words"])
    names = ("edit_rows", "edit_tokens", "edit_bias", "edit_penalty", "edit_addend")
    edit(scores, *(arrays[name] for name in names))
    assert torch.equal(scores, expected)
    pairs = list(zip(arrays["edit_rows"].tolist(), arrays["edit_tokens"].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)


def test_what_nobody_asks_for_is_left_out() -> None:
    arrays = sample_arrays([SampleRow(SamplingParams(9, 0), 0, 0)], VOCAB, EOS)
    assert set(arrays) == {"temperature", "top_k", "top_p", "min_p", "noise_keys"}
    assert arrays["top_k"].tolist() == [VOCAB]


def test_temperatures_near_zero_are_no_greedy_ones() -> None:
    rows = [SampleRow(SamplingParams(9, 0, temperature=t), 0, 0) for t in (0.0, 1e-300, 0.5)]
    temperature = sample_arrays(rows, VOCAB, EOS)["temperature"]
    assert temperature.dtype == np.float32
    assert temperature[0] == 0
    assert temperature[1] > 0
    assert temperature[2] == 0.5


@given(
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31), st.integers(0, 2**32 - 1)
        ),
        min_size=1,
        max_size=5,
    )
)
def test_noise_keys_are_those_of_each_row(draws) -> None:
    rows = [SampleRow(SamplingParams(9, seed), choice, index) for seed, choice, index in draws]
    keys = sample_arrays(rows, VOCAB, EOS)["noise_keys"].view(np.uint32)
    assert [tuple(map(int, line)) for line in keys] == [noise.row_key(*draw) for draw in draws]
