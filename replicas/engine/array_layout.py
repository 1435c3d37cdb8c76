"""Many arrays in one buffer, so that one copy takes them to the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

ALIGNMENT = 16
"""Bytes: kernels are compiled for pointers that are multiples of it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one array lies."""

    offset: int
    """Bytes, a multiple of `ALIGNMENT`."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Where arrays lie in a buffer of uint8, by name and in order."""

    places: Mapping[str, Place]
    begin: int
    end: int
    """Bytes up to the end of the last array, rounded up to `ALIGNMENT`."""

    @classmethod
    def of(cls, arrays: Mapping[str, Array], begin: int = 0) -> ArrayLayout:
        """One for arrays of these shapes and types, from byte `begin` of the buffer on."""
        places: dict[str, Place] = {}
        offset = begin
        for name, array in arrays.items():
            place = places[name] = Place(offset, array.shape, array.dtype)
            offset = _aligned(place.end)
        return cls(places, begin, offset)

    def write(self, arrays: Mapping[str, Array], buffer: npt.NDArray[np.uint8]) -> None:
        """Copy arrays, of the layout's shapes and types, to their places in `buffer`.

        Raises ValueError where names, shapes or types are others than the layout's.
        """
        if arrays.keys() != self.places.keys():
            raise ValueError(f"arrays {list(arrays)} for a layout of {list(self.places)}")
        for name, place in self.places.items():
            array = arrays[name]
            if array.shape != place.shape or array.dtype != place.dtype:
                raise ValueError(
                    f"{name} is {array.dtype} {array.shape}, not {place.dtype} {place.shape}"
                )
            view = buffer[place.offset : place.end].view(place.dtype)
            view.reshape(place.shape)[...] = array

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Views of the arrays in `buffer`, uint8 on any device."""
        return {
            name: buffer[place.offset : place.end].view(_TORCH[place.dtype]).view(place.shape)
            for name, place in self.places.items()
        }


_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
