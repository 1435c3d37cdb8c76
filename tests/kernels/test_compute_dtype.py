from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.compute_dtype import compute_dtype, cpu_multiplies_bfloat16

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _forget_the_machine() -> Iterator[None]:
    cpu_multiplies_bfloat16.cache_clear()
    yield
    cpu_multiplies_bfloat16.cache_clear()


@pytest.mark.parametrize("feature", ["avx512_bf16", "amx_bf16", None])
@pytest.mark.parametrize("query", [FP32, BF16])
@pytest.mark.parametrize("pool", [FP32, BF16])
def test_bfloat16_only_where_all_is_and_the_cpu_can(
    query: torch.dtype, pool: torch.dtype, feature: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True, "avx2": True})
    native = feature is not None and query == pool == BF16
    found = compute_dtype(torch.empty(1, dtype=query), torch.empty(1, dtype=pool))
    assert found == (BF16 if native else FP32)


def test_another_device_multiplies_what_it_is_given() -> None:
    half = torch.empty(1, dtype=torch.float16, device="meta")
    assert compute_dtype(half, half) == torch.float16
    assert compute_dtype(half, half.float()) == FP32
