"""Keys and values end up in their slots, normed, rotated and quantised, and nothing else does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.gpu.kv_write import kv_write
from kernels.reference_elementwise import rms_norm_reference, rotate_reference

FP8 = torch.float8_e4m3fn
BLOCKS, LAYERS, LAYER = 6, 3, 1
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


class Case:
    """Tokens of which every third has no slot, and a pool full of NaN."""

    def __init__(
        self, tokens: int, heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(tokens + dim)
        fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        self.query, self.key, self.value = (
            part.unflatten(1, (-1, dim)) for part in fused.split(sizes, dim=1)
        )
        self.slots = torch.randperm(BLOCKS * block_size)[:tokens]
        self.slots[::3] = -1
        self.shape = (BLOCKS, LAYERS, 2, kv_heads, block_size, dim)
        self.block_size = block_size

    def pool(self, dtype: torch.dtype) -> Tensor:
        return torch.full(self.shape, torch.nan).to(dtype)

    def written(self, pool: Tensor, part: int) -> Tensor:
        """What the slots hold, [tokens with a slot, kv_heads, dim]; asserts that the rest of the
        pool is NaN still."""
        slots = self.slots[self.slots >= 0]
        values = pool.float()
        found = values[slots // self.block_size, LAYER, part, :, slots % self.block_size].clone()
        values[slots // self.block_size, LAYER, :, :, slots % self.block_size] = torch.nan
        assert bool(values.isnan().all())
        return found


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rot_dim", "block_size"),
    [
        (1, 1, 64, 64, 16),
        (8, 2, 96, 96, 16),
        (7, 1, 80, 32, 64),
        (12, 12, 128, 128, 16),
        (5, 5, 112, 2, 32),
        (2, 1, 256, 256, 128),
        (17, 9, 64, 64, 1),
    ],
)
@pytest.mark.parametrize("normed", [False, True])
def test_norm_and_rotation(
    heads: int, kv_heads: int, dim: int, rot_dim: int, block_size: int, normed: bool
) -> None:
    for dtype in (torch.float32, torch.float16):
        case = Case(4, heads, kv_heads, dim, block_size, dtype)
        cos, sin = torch.randn(4, rot_dim), torch.randn(4, rot_dim)
        norms = {"q_norm": torch.rand(dim) + 0.5, "k_norm": torch.rand(dim) + 0.5}
        pool = case.pool(dtype)
        keys, values = pool[:, LAYER].unbind(1)
        query = kv_write(
            *(case.query, case.key, case.value, keys, values, case.slots),
            cos=cos,
            sin=sin,
            eps=1e-3,
            **(norms if normed else {}),
        )
        expected = []
        for heads_of, norm in ((case.query, norms["q_norm"]), (case.key, norms["k_norm"])):
            x = rms_norm_reference(heads_of, norm, 1e-3) if normed else heads_of
            expected.append(rotate_reference(x, cos, sin))
        assert query.dtype == dtype
        assert error(query, expected[0]) < TOLERANCE[dtype]
        found = case.written(pool.clone(), 0)
        assert error(found, expected[1][case.slots >= 0]) < TOLERANCE[dtype]
        assert torch.equal(case.written(pool, 1), case.value[case.slots >= 0].float())


def test_norm_without_rotation() -> None:
    case = Case(4, 4, 2, 80, 16, torch.float32)
    norm = torch.rand(80).to(torch.bfloat16)
    pool = case.pool(torch.float32)
    keys, values = pool[:, LAYER].unbind(1)
    query = kv_write(
        *(case.query, case.key, case.value, keys, values, case.slots), q_norm=norm, k_norm=norm
    )
    assert error(query, rms_norm_reference(case.query, norm, 1e-6)) < 1e-6


def test_plain_write_leaves_the_query_and_is_exact() -> None:
    case = Case(7, 3, 3, 80, 16, torch.bfloat16)
    pool = case.pool(torch.bfloat16)
    keys, values = pool[:, LAYER].unbind(1)
    query = kv_write(case.query, case.key, case.value, keys, values, case.slots)
    assert query is case.query
    assert torch.equal(case.written(pool.clone(), 0), case.key[case.slots >= 0].float())
    assert torch.equal(case.written(pool, 1), case.value[case.slots >= 0].float())


def test_narrower_values_and_a_wider_pool() -> None:
    key, value = torch.randn(2, 2, 24), torch.randn(2, 2, 16)
    keys, values = torch.full((2, 3, 2, 16, 32), torch.nan).unbind(0)
    kv_write(key, key, value, keys, values, torch.tensor([17, -9]))
    assert torch.equal(keys[1, :, 1, :24], key[0])
    assert torch.equal(values[1, :, 1, :16], value[0])
    assert int((~keys.isnan()).sum()) == key[0].numel()
    assert int((~values.isnan()).sum()) == value[0].numel()


def test_fp8_is_scaled_by_head_and_clamped() -> None:
    """Of values that FP8 holds exactly, as the interpreter does not round to it."""
    case = Case(5, 2, 3, 64, 16, torch.float32)
    case.slots = torch.tensor([-1, 18, 3, -1, 95])
    scales = torch.tensor([2.0**-7, 0.5, 8.0]), torch.tensor([4.0, 0.25, 2.0**-20])
    stored = [(heads * 50).to(FP8).float() for heads in (case.key, case.value)]
    key, value = (heads * scale[:, None] for heads, scale in zip(stored, scales, strict=True))
    key[1, 0, :4] = torch.tensor([3.51, -1e4, torch.inf, -torch.inf])
    stored[0][1, 0, :4] = torch.tensor([448.0, -448.0, 448.0, -448.0])
    pool = case.pool(FP8)
    keys, values = pool[:, LAYER].unbind(1)
    kv_write(
        *(case.query, key, value, keys, values, case.slots), k_scale=scales[0], v_scale=scales[1]
    )
    for part in (0, 1):
        assert torch.equal(case.written(pool.clone(), part), stored[part][case.slots >= 0])


def test_no_tokens() -> None:
    case = Case(0, 2, 2, 64, 16, torch.float32)
    keys, values = case.pool(torch.float32)[:, LAYER].unbind(1)
    assert kv_write(case.query, case.key, case.value, keys, values, case.slots).shape == (0, 2, 64)


def test_what_does_not_fit_is_refused() -> None:
    case = Case(4, 4, 2, 64, 16, torch.float32)
    keys, values = case.pool(torch.float32)[:, LAYER].unbind(1)
    fp8 = case.pool(FP8)[:, LAYER].unbind(1)
    q, k, v, slots = case.query, case.key, case.value, case.slots
    angles, scale = torch.zeros(4, 66), torch.ones(2)
    norm = torch.ones(64)
    for name, call in {
        "query": lambda: kv_write(q.transpose(1, 2), k, v, keys, values, slots),
        "key": lambda: kv_write(q, k[:, :, :32].contiguous(), v, keys, values, slots),
        "value": lambda: kv_write(q, k, v[:3], keys, values, slots),
        "slots": lambda: kv_write(q, k, v, keys, values, slots.int()),
        "key_blocks": lambda: kv_write(q, k, v, keys[:, :1], values[:, :1], slots),
        "value_blocks": lambda: kv_write(q, k, v, keys, values.contiguous(), slots),
        "cos": lambda: kv_write(q, k, v, keys, values, slots, cos=angles, sin=angles),
        "sin": lambda: kv_write(q, k, v, keys, values, slots, cos=angles[:, :64]),
        "k_norm": lambda: kv_write(q, k, v, keys, values, slots, q_norm=norm),
        "q_norm": lambda: kv_write(q, k, v, keys, values, slots, q_norm=scale, k_norm=scale),
        "k_scale": lambda: kv_write(q, k, v, *fp8, slots),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}:"):
            call()
    with pytest.raises(ValueError, match=r"^k_scale:"):
        kv_write(q, k, v, keys, values, slots, k_scale=scale, v_scale=scale)
