"""A prompt's block digests, as each kind of replica computes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from replicas.core.block_hash import BlockHasher
from replicas.protocol import EngineInfo, GenerateRequest
from router.replica_states import ReplicaState

BlockKind = tuple[str, str, str, int]
"""What digests are keyed by: fingerprint, KV dtype, digest of its scales, block size."""
Chains = Mapping[BlockKind, Sequence[bytes]]
"""Digests of all full blocks of a prompt, first block first, by kind of replica."""


def block_kind(engine: EngineInfo) -> BlockKind:
    """Replicas of one kind compute equal digests."""
    return engine.fingerprint, engine.kv_dtype, engine.kv_scales, engine.block_size


class PromptChains:
    """Hashes prompts with the replicas' own hash. Usually there is one kind; a rolling upgrade
    has two for a while."""

    def __init__(self) -> None:
        self._hashers: dict[BlockKind, BlockHasher] = {}

    def of(self, request: GenerateRequest, states: Iterable[ReplicaState]) -> Chains:
        """The request's chains for the kinds that are among `states`."""
        chains: dict[BlockKind, Sequence[bytes]] = {}
        for state in states:
            kind = block_kind(state.greeting.engine)
            if kind not in chains:
                hasher = self._hasher(kind)
                chains[kind] = hasher.chain(request.known_token_ids, request.cache_salt)
        return chains

    def _hasher(self, kind: BlockKind) -> BlockHasher:
        hasher = self._hashers.get(kind)
        if hasher is None:
            fingerprint, kv_dtype, kv_scales, block_size = kind
            hasher = BlockHasher(
                fingerprint=fingerprint,
                kv_dtype=kv_dtype,
                kv_scales=kv_scales,
                block_size=block_size,
            )
            self._hashers[kind] = hasher
        return hasher
