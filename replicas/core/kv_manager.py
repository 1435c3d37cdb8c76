"""Block tables: what of a choice's KV is on the device, and room for what comes next."""

from __future__ import annotations

from collections.abc import Iterable

from replicas.core.block_hash import BlockHasher
from replicas.core.block_pool import BlockPool
from replicas.core.request import Choice

BlockCopy = tuple[int, int]
"""(source block, destination block)."""


class KVManager:
    """Gives choices their blocks, finds their prefix, shares and copies on write.

    Holds no state of its own beside the pool: a choice's table is `Choice.blocks`.
    """

    def __init__(self, pool: BlockPool, hasher: BlockHasher, *, caching: bool = True) -> None:
        self.pool = pool
        self.block_size = hasher.block_size
        self.caching = caching
        self._hasher = hasher

    @property
    def capacity_tokens(self) -> int:
        """Tokens one choice alone can have KV for."""
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def admit(self, choice: Choice, reserve: int) -> bool:
        """Give an empty choice its prefix hits and blocks for its WHOLE known history.

        Room for the first chunk alone is not enough: two half-prefilled choices could then
        wait for each other for ever. `reserve` blocks must stay free. False, and nothing
        changed, where there is no room.
        """
        hits = self._find_prefix(choice)
        idle_hits = sum(1 for block in hits if self.pool.references(block) == 0)
        missing = self.blocks_for(choice.num_known_tokens) - len(hits)
        if self.pool.num_free - idle_hits - missing < reserve:
            return False
        for block in hits:
            self.pool.acquire(block)
        choice.blocks = hits + self.pool.allocate(missing)
        choice.num_computed_tokens = len(hits) * self.block_size
        choice.num_published_blocks = len(hits)
        return True

    def missing_blocks(self, choice: Choice, num_tokens: int) -> int:
        """Blocks to allocate before the next `num_tokens` tokens can be written."""
        needed = self.blocks_for(choice.num_computed_tokens + num_tokens) - len(choice.blocks)
        return max(0, needed) + self._writes_shared(choice)

    def grow(self, choice: Choice, num_tokens: int) -> BlockCopy | None:
        """Make the next `num_tokens` tokens writable; the caller saw `missing_blocks` free.

        Returns the copy to carry out first where the choice would write into a partial
        block that it shares: that block stays with the other holders.
        """
        copy = None
        if self._writes_shared(choice):
            index = choice.num_computed_tokens // self.block_size
            shared, (own,) = choice.blocks[index], self.pool.allocate(1)
            self.pool.release(shared)
            choice.blocks[index] = own
            copy = (shared, own)
        needed = self.blocks_for(choice.num_computed_tokens + num_tokens) - len(choice.blocks)
        if needed > 0:
            choice.blocks += self.pool.allocate(needed)
        return copy

    def publish(self, choice: Choice) -> None:
        """Make the choice's newly computed full blocks findable."""
        if not self.caching:
            return
        full = choice.num_computed_tokens // self.block_size
        if full > choice.num_published_blocks:
            self._extend_hashes(choice, full)
            for index in range(choice.num_published_blocks, full):
                self.pool.publish(choice.blocks[index], choice.block_hashes[index])
            choice.num_published_blocks = full

    def fork(self, parent: Choice, child: Choice) -> None:
        """Let `child` share all blocks that hold `parent`'s computed tokens."""
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_published_blocks = parent.num_published_blocks
        child.block_hashes = parent.block_hashes[: parent.num_published_blocks]
        child.blocks = parent.blocks[: self.blocks_for(parent.num_computed_tokens)]
        for block in child.blocks:
            self.pool.acquire(block)

    def release(self, choice: Choice) -> None:
        """Give back all blocks, the tail first, so that the tail is evicted first."""
        for block in reversed(choice.blocks):
            self.pool.release(block)
        choice.blocks = []
        choice.num_computed_tokens = 0
        choice.num_published_blocks = 0

    def check_integrity(self, choices: Iterable[Choice]) -> None:
        """Raise AssertionError unless the pool's references are exactly these choices' tables."""
        self.pool.check_integrity(block for choice in choices for block in choice.blocks)

    def _writes_shared(self, choice: Choice) -> bool:
        index, offset = divmod(choice.num_computed_tokens, self.block_size)
        return offset > 0 and self.pool.references(choice.blocks[index]) > 1

    def _find_prefix(self, choice: Choice) -> list[int]:
        """Blocks that hold the longest known prefix, short of the last known token:
        at least one token must be computed to have logits to draw from."""
        if not self.caching:
            return []
        limit = (choice.num_known_tokens - 1) // self.block_size
        if choice.sampling.prompt_logprobs is not None and choice.index == 0:
            limit = min(limit, self._logprobs_known(choice) // self.block_size)
        self._extend_hashes(choice, limit)
        hits: list[int] = []
        for digest in choice.block_hashes[:limit]:
            block = self.pool.lookup(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def _logprobs_known(self, choice: Choice) -> int:
        """Tokens whose logits the choice does not need any more for its prompt's logprobs."""
        known = len(choice.prompt_logprobs)
        done = known >= choice.request.num_prompt_tokens - 1
        return choice.num_known_tokens if done else known

    def _extend_hashes(self, choice: Choice, count: int) -> None:
        hashes, size = choice.block_hashes, self.block_size
        parent = hashes[-1] if hashes else self._hasher.root(choice.request.data.cache_salt)
        for index in range(len(hashes), count):
            parent = self._hasher.extend(parent, choice.tokens(index * size, (index + 1) * size))
            hashes.append(parent)
