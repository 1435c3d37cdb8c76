"""Places requests: prefix index + load book + policy. Pure; the clock is an argument."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.core.block_hash import BlockHasher
from replicas.protocol import GenerateRequest
from router.load_book import LoadBook
from router.policies.least_loaded import LeastLoaded
from router.policies.policy import Candidate, PlacementPolicy
from router.policies.prefix_aware import PrefixAware
from router.policies.round_robin import RoundRobin
from router.prefix_index import PrefixIndex

POLICIES: dict[str, type[PlacementPolicy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}

INDEX_BLOCKS = 16_384
"""Digests remembered a replica: a million tokens at 64 a block."""

EXPECTED_OUTPUT_TOKENS = 128
"""An output is rarely as long as `max_tokens` allows; this much of it is booked at the most."""


class Placer:
    """Chooses a replica for a request and books the work there, in one step without waiting."""

    def __init__(self, policy: PlacementPolicy, block_size: int) -> None:
        self._policy = policy
        # Only compared with itself: what the index holds is what this router sent where.
        self._hasher = BlockHasher(fingerprint="router", kv_dtype="", block_size=block_size)
        self._index = PrefixIndex(INDEX_BLOCKS)
        self._book = LoadBook()

    def place(
        self, call_id: str, request: GenerateRequest, replicas: Sequence[str], now: float
    ) -> list[str]:
        """All `replicas`, the best first; the first is booked under `call_id`."""
        self._book.expire(now)
        self._book.release(call_id)
        chain = self._hasher.chain(request.prompt_token_ids, request.cache_salt)
        candidates = [self._candidate(replica, request, chain) for replica in replicas]
        ranked = self._policy.rank(candidates)
        best = ranked[0]
        expected = request.n * min(request.sampling.max_tokens, EXPECTED_OUTPUT_TOKENS)
        self._book.book(call_id, best.replica, best.uncached_tokens + expected, now)
        self._index.insert(best.replica, chain)
        return [candidate.replica for candidate in ranked]

    def routed(self, call_id: str) -> None:
        """The call has reached a replica."""
        self._book.confirm(call_id)

    def completed(self, call_id: str) -> None:
        """The call has ended, well or not."""
        self._book.release(call_id)

    def forget(self, replica: str) -> None:
        """A replica has died: its KV is gone, its bookings too."""
        self._index.drop(replica)
        self._book.drop(replica)

    def requests(self, replica: str) -> int:
        """Requests in work on `replica`."""
        return self._book.requests(replica)

    def _candidate(
        self, replica: str, request: GenerateRequest, chain: Sequence[bytes]
    ) -> Candidate:
        hit = self._index.match(replica, chain) * self._hasher.block_size
        length = len(request.prompt_token_ids)
        return Candidate(
            replica=replica,
            requests=self._book.requests(replica),
            tokens=self._book.tokens(replica),
            uncached_tokens=length - min(hit, length - 1),  # one token is always computed
        )
