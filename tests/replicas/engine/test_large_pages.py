"""Memory that a pool is made of."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from kernels.fp8 import FP8
from replicas.engine import large_pages
from tests.replicas.engine.test_kv_pool import make_pool

MIB = 2**20
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping(address: int) -> str:
    """What the kernel says of the mapping that `address` lies in."""
    for each in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(bound, 16) for bound in each.split()[0].split("-"))
        if start <= address < end:
            return each
    raise AssertionError("the address is not mapped")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_all_of_it_is_zero_and_can_be_written(dtype: torch.dtype) -> None:
    memory = large_pages.zeros((3, 5, 7), dtype)
    assert (memory.shape, memory.dtype, memory.device.type) == ((3, 5, 7), dtype, "cpu")
    assert memory.is_contiguous()
    assert not memory.float().any()
    memory[2, 4, 6] = 1.0
    assert memory.float().sum() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_of_it_is_there_before_it_is_used() -> None:
    memory = large_pages.zeros((16 * MIB,), torch.bfloat16)
    resident = re.search(r"Rss:\s+(\d+) kB", mapping(memory.data_ptr()))
    assert resident is not None
    assert int(resident[1]) >= 32 * 1024


@pytest.mark.skipif(not THP.exists(), reason="a kernel without large pages")
def test_a_pools_pages_are_large_where_the_system_has_such() -> None:
    keys, _ = make_pool().layer(0)
    flags = re.search(r"VmFlags:(.*)", mapping(keys.data_ptr()))
    assert flags is not None
    assert "hg" in flags[1].split()


def test_more_than_there_is_is_refused_with_its_size() -> None:
    with pytest.raises(MemoryError, match="no host memory for 1,125,899,906,842,624 bytes"):
        large_pages.zeros((2**48,), torch.float32)
