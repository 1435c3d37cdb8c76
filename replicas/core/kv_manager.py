"""Block tables: what of a choice's KV is on the device, and room for what comes next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

from replicas.core.block_hash import BlockHasher
from replicas.core.block_pool import BlockPool
from replicas.core.block_transfer import EndedCopy, Location
from replicas.core.cost_model import CostModel
from replicas.core.offloader import Offloader
from replicas.core.request import Choice

BlockCopy = tuple[int, int]
"""(source block, destination block)."""


class KVManager:
    """Gives choices their blocks, finds their prefix, shares and copies on write.

    Holds no state of its own beside the pool and the host tier: a choice's table is
    `Choice.blocks`. Without caching, released blocks are forgotten, and what the host tier
    keeps for a choice is private to it.
    """

    def __init__(
        self,
        pool: BlockPool,
        hasher: BlockHasher,
        *,
        costs: CostModel,
        caching: bool = True,
        offloader: Offloader | None = None,
        spill_tokens: int | None = None,
    ) -> None:
        """`offloader` is None without a host tier. Chains of `spill_tokens` or more of choices
        that ended are worth spilling to it even if nobody ever hit them, where `costs` says that
        copies cost less than computing."""
        self.pool = pool
        self.block_size = hasher.block_size
        self.caching = caching
        self.offloader = offloader
        self.costs = costs
        self._hasher = hasher
        self._spill_tokens = spill_tokens

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
        wait for each other for ever. `reserve` blocks must stay free. False, and the choice
        has got nothing, where there is no room, or where something is to be waited for: a
        block that arrives for another (`awaits_arrival`), or the saves of what it would evict.
        """
        limit = self._max_hits(choice)
        self._extend_hashes(choice, limit)
        hits = self._find_on_device(choice, limit)
        idle_hits = sum(1 for block in hits if self.pool.references(block) == 0)
        missing = self.blocks_for(choice.num_known_tokens) - len(hits)
        if self.pool.num_free - idle_hits - missing < reserve:
            return False
        sources = self._find_on_host(choice, len(hits), limit)
        choice.awaits_arrival = sources is None
        if sources is None or self._make_room(choice.block_hashes[:limit], missing, hits):
            return False
        for block in hits:
            self.pool.acquire(block)
            if choice.scheduled_at is None:  # who comes back finds itself: no sign of popularity
                self.pool.prize(block)
        choice.blocks = hits + self.pool.allocate(missing)
        choice.num_computed_tokens = len(hits) * self.block_size
        choice.num_published_blocks = choice.num_found_blocks = len(hits)
        self._restore(choice, sources)
        return True

    def uncached_tokens(self, choice: Choice) -> int:
        """How many known tokens an empty choice would have to compute if it were admitted now.

        Found by bisection, which is cheap enough for every step: what is left of a chain is a
        prefix of it, but for what a failed copy took out.
        """
        limit = self._max_hits(choice)
        self._extend_hashes(choice, limit)
        hashes, found = choice.block_hashes, 0
        if self.caching:
            found = bisect_left(hashes, True, 0, limit, key=self._is_off_device)
        if self._restores(choice):
            found = bisect_left(hashes, True, found, limit, key=self._is_off_host)
        return choice.num_known_tokens - found * self.block_size

    def take_arrival(self, choice: Choice, block: int, *, ok: bool) -> bool:
        """A block that `choice` waits for has been filled, or not. True where it was the last:
        then the choice has what arrived without a gap, and computes the rest."""
        index = choice.arriving.pop(block)
        if ok:
            choice.arrived.add(index)
        if choice.arriving:
            return False
        while choice.num_computed_tokens // self.block_size in choice.arrived:
            choice.num_computed_tokens += self.block_size
        choice.arrived.clear()
        first = choice.num_published_blocks
        self.publish(choice, restored=True)
        if not choice.returns:  # found on the host, it is as popular as if found here
            for block in choice.blocks[first : choice.num_published_blocks]:
                self.pool.prize(block)
        return True

    def missing_blocks(self, choice: Choice, num_tokens: int) -> int:
        """Blocks to allocate before the next `num_tokens` tokens can be written."""
        needed = self.blocks_for(choice.num_given_tokens + num_tokens) - len(choice.blocks)
        return max(0, needed) + self._writes_shared(choice)

    def grow(self, choice: Choice, num_tokens: int) -> BlockCopy | None:
        """Make the next `num_tokens` tokens writable; the caller saw `missing_blocks` free.

        Returns the copy to carry out first where the choice would write into a partial
        block that it shares: that block stays with the other holders.
        """
        copy = None
        if self._writes_shared(choice):
            index = choice.num_given_tokens // self.block_size
            shared, (own,) = choice.blocks[index], self.pool.allocate(1)
            self.pool.release(shared)
            choice.blocks[index] = own
            copy = (shared, own)
        needed = self.blocks_for(choice.num_given_tokens + num_tokens) - len(choice.blocks)
        if needed > 0:
            choice.blocks += self.pool.allocate(needed)
        return copy

    def publish(self, choice: Choice, *, restored: bool = False) -> None:
        """Make the choice's newly computed, or `restored`, full blocks findable."""
        if not self.caching:
            return
        full = choice.num_computed_tokens // self.block_size
        if full > choice.num_published_blocks:
            self._extend_hashes(choice, full)
            for index in range(choice.num_published_blocks, full):
                block, digest = choice.blocks[index], choice.block_hashes[index]
                self.pool.publish(block, digest, restored=restored)
            choice.num_published_blocks = full

    def fork(self, parent: Choice, child: Choice) -> None:
        """Let `child` share all blocks that hold `parent`'s computed tokens."""
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_published_blocks = parent.num_published_blocks
        child.num_found_blocks = parent.num_computed_tokens // self.block_size
        child.block_hashes = parent.block_hashes[: parent.num_published_blocks]
        child.blocks = parent.blocks[: self.blocks_for(parent.num_computed_tokens)]
        for block in child.blocks:
            self.pool.acquire(block)

    def empty_slots(self, running: Iterable[Choice]) -> int:
        """Token slots of used blocks that hold no token: the room a choice got for what it has
        not computed yet, and the rests of last blocks."""
        filled: dict[int, int] = {}
        for choice in running:
            full, rest = divmod(choice.num_computed_tokens, self.block_size)
            for block in choice.blocks[full:]:
                filled[block] = max(filled.get(block, 0), rest)
                rest = 0
        return sum(self.block_size - tokens for tokens in filled.values())

    def freed_by(self, choice: Choice) -> int:
        """Blocks that releasing the choice would give back now."""
        return sum(1 for block in choice.blocks if self.pool.references(block) == 1)

    def leading_shared(self, choice: Choice, limit: int) -> int:
        """How many of the first `limit` blocks others hold as well, so that they stay where the
        choice finds them."""
        if not self.caching:
            return 0
        for index, block in enumerate(choice.blocks[:limit]):
            if self.pool.references(block) == 1:
                return index
        return limit

    def hash_kept(self, choice: Choice) -> None:
        """Make the digests of all full blocks known that can be kept."""
        self._extend_hashes(choice, choice.num_kept_tokens // self.block_size)

    def lacking_on_host(self, choice: Choice) -> int:
        """How many of the full blocks, hashed before, a swap would have to write."""
        if self.offloader is None:
            return 0
        digests = choice.block_hashes[: choice.num_kept_tokens // self.block_size]
        return sum(1 for digest in digests if not self.offloader.tier.holds(digest))

    def swap_out(self, choice: Choice) -> int:
        """Keep the full blocks, hashed before, on the host; gives how many are kept."""
        if self.offloader is None:
            return 0
        return self.offloader.swap_out(choice, choice.num_kept_tokens // self.block_size)

    def keep_on_host(self, choice: Choice) -> int:
        """Pin what the host holds for the choice; gives the number of blocks."""
        return 0 if self.offloader is None else self.offloader.repin(choice)

    def spill(self, demand: int, spared: Collection[int] = ()) -> int:
        """Write what is worth keeping of the cached blocks that the next `demand` allocations
        would evict, the `spared` ones not being there; gives the number of copies."""
        if self.offloader is None:
            return 0
        doomed = self.pool.prized_next(demand, spared)
        for block, _ in doomed:
            # One attempt: a tier too small for all would else be written over and over.
            self.pool.unprize(block)
        if not self.costs.pays_to_spill(self.block_size):
            doomed = [each for each in doomed if self.offloader.tier.holds(each[1])]
        return self.offloader.spill(doomed)

    def end_copies(self, ended: Sequence[EndedCopy]) -> None:
        """Let go of what ended copies held, after their choices took the arrivals."""
        if self.offloader is not None:
            self.offloader.end(ended)

    def release(self, choice: Choice, *, ended: bool = False) -> None:
        """Give back all blocks, the tail first, so that the tail is evicted first. Of a choice
        that has not ended nothing is worth spilling for that: to keep it is for whoever preempts
        it to decide."""
        long = self._spill_tokens if ended else None
        if long is not None and choice.num_published_blocks * self.block_size >= long:
            for block in choice.blocks[: choice.num_published_blocks]:
                self.pool.prize(block)
        choice.arriving.clear()
        choice.arrived.clear()
        for block in reversed(choice.blocks):
            self.pool.release(block)
        choice.lose_blocks()

    def check_integrity(self, choices: Iterable[Choice]) -> None:
        """Raise AssertionError unless the pool's references are exactly these choices' tables
        and the copies under way."""
        living = list(choices)
        held = [block for choice in living for block in choice.blocks]
        if self.offloader is not None:
            held += self.offloader.held_blocks()
            self.offloader.check_integrity(living)
        self.pool.check_integrity(held)

    def _writes_shared(self, choice: Choice) -> bool:
        index, offset = divmod(choice.num_given_tokens, self.block_size)
        return offset > 0 and self.pool.references(choice.blocks[index]) > 1

    def _max_hits(self, choice: Choice) -> int:
        """Blocks that may be found instead of computed, short of the last known token: at least
        one token must be computed to have logits to draw from."""
        if not self.caching and not choice.host_blocks:
            return 0
        limit = (choice.num_known_tokens - 1) // self.block_size
        if choice.sampling.prompt_logprobs is not None and choice.index == 0:
            limit = min(limit, self._logprobs_known(choice) // self.block_size)
        return limit

    def _find_on_device(self, choice: Choice, limit: int) -> list[int]:
        hits: list[int] = []
        if not self.caching:
            return hits
        for digest in choice.block_hashes[:limit]:
            block = self.pool.lookup(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def _find_on_host(self, choice: Choice, first: int, limit: int) -> list[Location] | None:
        """Where the blocks `first`.. can be read from; None where another choice is fetching
        one of them already: once it has arrived it is a hit on the device."""
        sources: list[Location] = []
        if self.offloader is None or not self._restores(choice):
            return sources
        for digest in choice.block_hashes[first:limit]:
            if self.offloader.is_arriving(digest):
                return None
            source = self.offloader.find(digest)
            if source is None:
                break
            sources.append(source)
        return sources

    def _restores(self, choice: Choice) -> bool:
        """Whether what the host has of the choice is to be copied back: where that costs less
        than to compute it, or where it was kept so as to be."""
        if self.offloader is None or choice.shuns_host:
            return False
        insists = choice.resume is not None and choice.resume.insists
        return insists or self.costs.pays_to_restore(self.block_size)

    def _make_room(self, chain: Sequence[bytes], missing: int, hits: Collection[int]) -> bool:
        """Save what allocating `missing` blocks beside the `hits` would evict. True where there is
        something to save."""
        if self.offloader is None:
            return False
        self.offloader.tier.touch(chain)  # else it might be what makes way for the saves
        return self.spill(missing, hits) > 0

    def _is_off_device(self, digest: bytes) -> bool:
        return self.pool.lookup(digest) is None

    def _is_off_host(self, digest: bytes) -> bool:
        return self.offloader is None or not self.offloader.tier.holds(digest)

    def _restore(self, choice: Choice, sources: Sequence[Location]) -> None:
        if self.offloader is None:
            return
        first = choice.num_published_blocks
        for index, source in enumerate(sources, first):
            self.offloader.restore(source, choice.blocks[index], choice.block_hashes[index])
            choice.arriving[choice.blocks[index]] = index
        self.offloader.unpin(choice)

    def _logprobs_known(self, choice: Choice) -> int:
        """Tokens whose logits the choice does not need any more for its prompt's logprobs."""
        known = len(choice.prompt_logprobs)
        done = known >= choice.request.num_prompt_tokens - 1
        return choice.num_known_tokens if done else known

    def _extend_hashes(self, choice: Choice, count: int) -> None:
        hashes, size = choice.block_hashes, self.block_size
        parent = hashes[-1] if hashes else self._root(choice)
        for index in range(len(hashes), count):
            parent = self._hasher.extend(parent, choice.tokens(index * size, (index + 1) * size))
            hashes.append(parent)

    def _root(self, choice: Choice) -> bytes:
        private = () if self.caching else (choice.request.id, str(choice.index))
        return self._hasher.root(choice.request.data.cache_salt, *private)
