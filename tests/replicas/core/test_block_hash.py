from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.core.block_hash import DIGEST_BYTES, BlockHasher

ROOT = Path(__file__).parents[3]
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def hasher(
    fingerprint: str = "model",
    kv_dtype: str = "float32",
    block_size: int = 2,
    adapter: str = "",
    kv_scales: str = "",
) -> BlockHasher:
    return BlockHasher(
        fingerprint=fingerprint,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        block_size=block_size,
        adapter=adapter,
    )


def test_only_full_blocks_are_hashed() -> None:
    chain = hasher(block_size=4).chain(range(11))
    assert len(chain) == 2
    assert all(len(digest) == DIGEST_BYTES for digest in chain)
    assert hasher(block_size=4).chain(range(3)) == []


def test_equal_prefixes_have_equal_digests() -> None:
    one, other = hasher().chain([1, 2, 3, 4, 5, 6]), hasher().chain([1, 2, 3, 4, 9, 9])
    assert one[:2] == other[:2]
    assert one[2] != other[2]


def test_same_tokens_under_another_parent_differ() -> None:
    first, second = hasher().chain([7, 8, 7, 8])
    assert first != second
    assert hasher().chain([1, 2, 7, 8])[1] not in (first, second)


def test_token_ids_are_not_joined_like_text() -> None:
    """O08: KV is found by a cryptographic digest of the parent and fixed-width token ids."""
    assert hasher().chain([1, 23]) != hasher().chain([12, 3])
    assert hasher().chain([256, 0]) != hasher().chain([0, 1])


@pytest.mark.parametrize(
    "other",
    [
        hasher(fingerprint="other"),
        hasher(kv_dtype="bfloat16"),
        hasher(adapter="lora"),
        hasher(kv_scales="digest"),
        # Only the borders between the fields differ.
        hasher(fingerprint="modelf", kv_dtype="loat32"),
        hasher(kv_dtype="float", kv_scales="32"),
        hasher(fingerprint="model\0", kv_dtype="float32"),
    ],
)
def test_scopes_share_nothing(other: BlockHasher) -> None:
    tokens = [1, 2, 3, 4]
    assert not {*hasher().chain(tokens), hasher().root()} & {*other.chain(tokens), other.root()}


def test_block_sizes_share_nothing() -> None:
    tokens = [1, 2, 3, 4]
    small, large = hasher(block_size=2), hasher(block_size=4)
    assert not set(small.chain(tokens)) & set(large.chain(tokens))
    assert small.root() != large.root()


def test_layout_version_is_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hasher().chain([1, 2])
    monkeypatch.setattr("replicas.core.block_hash.LAYOUT_VERSION", 2)
    assert hasher().chain([1, 2]) != before


def test_salts_share_nothing() -> None:
    tokens = [1, 2, 3, 4]
    chains = [hasher().chain(tokens, salt) for salt in ("", "a", "b")]
    assert len({digest for chain in chains for digest in chain}) == 6


@given(first=TOKENS, second=TOKENS)
def test_digests_are_equal_only_for_equal_prefixes(first: list[int], second: list[int]) -> None:
    pairs = zip(hasher().chain(first), hasher().chain(second), strict=False)
    for index, (one, other) in enumerate(pairs):
        stop = 2 * (index + 1)
        assert (one == other) == (first[:stop] == second[:stop])


@given(tokens=TOKENS, salt=st.text(max_size=3))
def test_extending_equals_the_chain(tokens: list[int], salt: str) -> None:
    parent, chain = hasher().root(salt), []
    for start in range(0, len(tokens) - 1, 2):
        parent = hasher().extend(parent, tokens[start : start + 2])
        chain.append(parent)
    assert chain == hasher().chain(tokens, salt)


def test_extend_takes_exactly_one_block() -> None:
    for tokens in ([1], [1, 2, 3]):
        with pytest.raises(Exception, match="expected 2 items"):
            hasher().extend(hasher().root(), tokens)


def test_processes_agree_whatever_their_hash_seed() -> None:
    code = (
        "from replicas.core.block_hash import BlockHasher\n"
        "h = BlockHasher(fingerprint='model', kv_dtype='float32', block_size=2, adapter='a')\n"
        "print(h.chain([1, 2, 3, 4], 'salt')[-1].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "4242")
    }
    assert seen == {hasher(adapter="a").chain([1, 2, 3, 4], "salt")[-1].hex()}
