"""Arrays in one buffer: every one comes out as it went in, where kernels may read it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from replicas.engine.array_layout import ALIGNMENT, ArrayLayout

TYPES = [np.int32, np.int64, np.float32, np.float64]
values = st.sampled_from(TYPES).flatmap(
    lambda kind: arrays(kind, array_shapes(max_dims=2, min_side=0, max_side=5), elements=st.just(3))
)


@given(st.dictionaries(st.text(max_size=3), values, max_size=5), st.sampled_from([0, 16, 64]))
def test_arrays_come_out_as_they_went_in(given_arrays, begin) -> None:
    layout = ArrayLayout.of(given_arrays, begin)
    buffer = torch.full((layout.end,), 255, dtype=torch.uint8)
    layout.write(given_arrays, buffer.numpy())
    tensors = layout.tensors(buffer)
    assert list(tensors) == list(given_arrays)
    for name, array in given_arrays.items():
        assert tensors[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensors[name].numpy(), array)
        assert layout.places[name].offset % ALIGNMENT == 0
    assert bool((buffer[:begin] == 255).all())
    spans = sorted((place.offset, place.end) for place in layout.places.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize(
    "changed",
    [{"b": np.zeros(2)}, {"a": np.zeros(3)}, {"a": np.zeros(2, dtype=np.float32)}],
    ids=["name", "shape", "type"],
)
def test_other_arrays_than_the_layouts_are_refused(changed) -> None:
    layout = ArrayLayout.of({"a": np.zeros(2)})
    with pytest.raises(ValueError, match=r"layout of|not float64"):
        layout.write(changed, np.zeros(layout.end, dtype=np.uint8))
