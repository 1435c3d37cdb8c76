"""Block tables against their content: the machine plays the device that writes the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from replicas.core.request import Choice, Request
from tests.replicas.core.builders import make_hasher, make_kv, make_request
from tests.replicas.core.fake_device import FakeDevice, kv_chain

_SHARED = (1, 2, 3, 1, 2, 1, 3, 3, 2, 1, 1, 2, 3, 2, 2, 1)


class KVManagerMachine(RuleBasedStateMachine):
    """Admits, grows, forks and releases choices, and writes what they compute.

    Each token's KV depends on all tokens before it, so that a wrong hit, a missing copy
    and a write into somebody else's block all show as content that is not the choice's.
    """

    choices = Bundle("choices")

    @initialize(
        num_blocks=st.integers(1, 16), block_size=st.sampled_from((1, 2, 4)), caching=st.booleans()
    )
    def start(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.kv = make_kv(num_blocks, block_size, caching=caching)
        self.device = FakeDevice(num_blocks, block_size)
        self.requests: list[Request] = []

    @rule(
        target=choices,
        shared=st.integers(1, len(_SHARED)),
        tail=st.lists(st.integers(1, 2), max_size=4),
        salt=st.sampled_from(("", "tenant")),
    )
    def arrive(self, shared: int, tail: list[int], salt: str) -> Choice:
        data = make_request(f"r{len(self.requests)}", (*_SHARED[:shared], *tail), n=3, salt=salt)
        self.requests.append(Request(data, rank=(0, len(self.requests)), arrived_at=0.0))
        return self.requests[-1].choices[0]

    @rule(choice=choices, reserve=st.integers(0, 2))
    def admit(self, choice: Choice, reserve: int) -> None:
        if choice.blocks:
            return
        pool, known = self.kv.pool, choice.num_known_tokens
        total = self.kv.blocks_for(known)
        limit = (known - 1) // self.kv.block_size
        found = [pool.lookup(digest) for digest in self._digests(choice)[:limit]]
        hits = [block for block in takewhile(lambda b: b is not None, found) if block is not None]
        taken = total - sum(pool.references(block) > 0 for block in hits)
        free = pool.num_free
        if not any(found[len(hits) :]):  # else the chain has a hole, and it is a guess
            uncached = known - len(hits) * self.kv.block_size
            assert self.kv.uncached_tokens(choice) == uncached
        admitted = self.kv.admit(choice, reserve)
        assert admitted == (free - taken >= reserve)
        assert pool.num_free == (free - taken if admitted else free)
        assert len(choice.blocks) == (total if admitted else 0)
        assert choice.num_computed_tokens == (len(hits) * self.kv.block_size if admitted else 0)
        assert choice.blocks[: len(hits)] == (hits if admitted else [])

    @rule(choice=choices, count=st.integers(1, 8))
    def compute(self, choice: Choice, count: int) -> None:
        """A step: copy, write, publish; at the end of the known tokens comes a new one."""
        count = min(count, choice.num_remaining_tokens)
        if not choice.blocks or self.kv.missing_blocks(choice, count) > self.kv.pool.num_free:
            return
        before, missing = self.kv.pool.num_free, self.kv.missing_blocks(choice, count)
        copy = self.kv.grow(choice, count)
        assert before - self.kv.pool.num_free == missing
        if copy is not None:
            self.device.copy([copy])
        start = choice.num_computed_tokens
        salt = choice.request.data.cache_salt
        for position in range(start, start + count):
            block = choice.blocks[position // self.kv.block_size]
            assert self.kv.pool.references(block) == 1, "writing into a shared block"
        self.device.write(choice.blocks, start, choice.tokens(start, start + count), salt)
        choice.num_computed_tokens += count
        self.kv.publish(choice)
        if choice.num_remaining_tokens == 0 and not self._may_fork(choice):
            choice.output_token_ids.append(1 + choice.index)

    @rule(target=choices, choice=choices)
    def fork(self, choice: Choice) -> Choice:
        """All choices of a request go on from its prefilled prompt."""
        if not self._may_fork(choice):
            return choice
        free = self.kv.pool.num_free
        for child in choice.request.choices[1:]:
            self.kv.fork(choice, child)
            assert child.num_computed_tokens == choice.num_computed_tokens
        assert self.kv.pool.num_free == free, "forking takes no block"
        for each in choice.request.choices:
            each.output_token_ids.append(1 + each.index)
        return choice.request.choices[1]

    @rule(choice=choices)
    def release(self, choice: Choice) -> None:
        self.kv.release(choice)
        assert (choice.blocks, choice.num_computed_tokens) == ([], 0)

    @rule(request=st.integers(0, 100), index=st.integers(0, 2))
    def release_any(self, request: int, index: int) -> None:
        if self.requests:
            self.kv.release(self.requests[request % len(self.requests)].choices[index])

    @invariant()
    def tables_hold_their_choices_tokens(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity(self._all())
        for choice in self._all():
            count = choice.num_computed_tokens
            assert len(choice.blocks) >= self.kv.blocks_for(count)
            assert self.device.contents(choice.blocks, count) == self._content(choice, count)

    @invariant()
    def findable_blocks_hold_what_their_digest_says(self) -> None:
        if not hasattr(self, "kv"):
            return
        size = self.kv.block_size
        for choice in self._all():
            chain = self._content(choice, choice.num_known_tokens)
            for index, digest in enumerate(self._digests(choice)):
                block = self.kv.pool.lookup(digest)
                if block is not None:
                    content = chain[index * size : (index + 1) * size]
                    assert self.device.slots[block] == content

    def _may_fork(self, choice: Choice) -> bool:
        prompt = choice.request.num_prompt_tokens
        return choice.num_computed_tokens == choice.num_known_tokens == prompt

    def _content(self, choice: Choice, count: int) -> Sequence[int]:
        return kv_chain(choice.tokens(0, count), choice.request.data.cache_salt)

    def _digests(self, choice: Choice) -> list[bytes]:
        tokens = choice.tokens(0, choice.num_known_tokens)
        return make_hasher(self.kv.block_size).chain(tokens, choice.request.data.cache_salt)

    def _all(self) -> list[Choice]:
        return [choice for request in self.requests for choice in request.choices]


TestKVManager = KVManagerMachine.TestCase
TestKVManager.settings = settings(max_examples=60, stateful_step_count=40)
