"""A device of pure arithmetic that keeps what is written to every block and checks every read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from zlib import crc32

from replicas.core.block_transfer import EndedCopy, Restore, Save
from replicas.core.request import ChoiceKey
from replicas.core.scheduler_output import (
    PENDING,
    Draw,
    SampledToken,
    ScheduledChoice,
    SchedulerOutput,
    StepResult,
)
from replicas.protocol import FinishReason, GenerateRequest, TokenLogprobs

VOCAB_SIZE = 7
EOS = 0
_MULTIPLIER = 6364136223846793005
_MASK = 2**64 - 1


def kv_chain(token_ids: Sequence[int], salt: str = "") -> list[int]:
    """The KV of every position: like a model's, it depends on all tokens up to it.

    It depends on the salt as well, so that sharing across salts shows as wrong content.
    """
    chain, kv = [], crc32(salt.encode())
    for token in token_ids:
        kv = next_kv(kv, token)
        chain.append(kv)
    return chain


def next_kv(previous: int, token: int) -> int:
    return (previous * _MULTIPLIER + token + 1442695040888963407) & _MASK


def draw_token(kv: int, seed: int, choice: int, output_index: int) -> int:
    """The next token, a pure function of its logits (`kv`) and of where it stands."""
    noise = next_kv(next_kv(next_kv(kv, seed), choice), output_index)
    return (noise >> 33) % VOCAB_SIZE


def prompt_logprob(kv: int) -> TokenLogprobs:
    return TokenLogprobs(logprob=-float(kv >> 40), rank=1, top=())


def reference(data: GenerateRequest, choice: int, limit: int) -> tuple[list[int], FinishReason]:
    """What an undisturbed run gives; `limit` bounds prompt and output tokens."""
    kv = kv_chain(data.prompt_token_ids, data.cache_salt)[-1]
    sampling, outputs = data.sampling, list[int]()
    while True:
        token = draw_token(kv, sampling.seed, choice, len(outputs))
        outputs.append(token)
        if token == EOS and not sampling.ignore_eos and len(outputs) >= sampling.min_tokens:
            return outputs, FinishReason.STOP
        full = len(data.prompt_token_ids) + len(outputs) >= limit
        if full or len(outputs) >= sampling.max_tokens:
            return outputs, FinishReason.LENGTH
        kv = next_kv(kv, token)


def reference_prompt_logprobs(data: GenerateRequest) -> tuple[TokenLogprobs, ...]:
    chain = kv_chain(data.prompt_token_ids, data.cache_salt)
    return tuple(prompt_logprob(kv) for kv in chain[:-1])


class FakeDevice:
    """Blocks 0..num_blocks of slots; a slot holds the KV of one position, None at first.

    Freed blocks keep what was in them, as on a real device, so stale reads are seen.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks + 1)]
        self._drawn: dict[ChoiceKey, SampledToken] = {}

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """All sources are read before any destination is written."""
        destinations = [destination for _, destination in pairs]
        assert len(set(destinations)) == len(destinations)
        contents = [list(self.slots[source]) for source, _ in pairs]
        for destination, content in zip(destinations, contents, strict=True):
            self.slots[destination] = content

    def write(self, blocks: Sequence[int], start: int, token_ids: Sequence[int], salt: str) -> None:
        """Compute the KV of `token_ids` at `start` from what the table holds before them."""
        previous = self.read(blocks, start - 1) if start else crc32(salt.encode())
        assert previous is not None, "computing on an empty slot"
        for position, token in enumerate(token_ids, start):
            previous = next_kv(previous, token)
            index, offset = divmod(position, self.block_size)
            assert blocks[index] != 0, "block 0 is reserved"
            self.slots[blocks[index]][offset] = previous

    def read(self, blocks: Sequence[int], position: int) -> int | None:
        index, offset = divmod(position, self.block_size)
        return self.slots[blocks[index]][offset]

    def contents(self, blocks: Sequence[int], stop: int) -> list[int | None]:
        """What a table holds for positions 0..stop."""
        return [self.read(blocks, position) for position in range(stop)]

    def run(
        self,
        output: SchedulerOutput,
        requests: dict[str, GenerateRequest],
        known: Callable[[ChoiceKey], Sequence[int]],
    ) -> StepResult:
        """Carry a step out. `known` gives a choice's tokens as its client has seen them; what the
        step before drew for a PENDING one comes on top."""
        self.copy(output.block_copies)
        scheduled = [self._fill(item) for item in output.scheduled]
        pending = {item.key for item in output.scheduled if item.token_ids[-1] == PENDING}

        def history_of(key: ChoiceKey) -> Sequence[int]:
            return [*known(key), self._drawn[key].token_id] if key in pending else known(key)

        for item in scheduled:
            salt = requests[item.key[0]].cache_salt
            assert len(set(item.blocks)) == len(item.blocks), "a block twice in one table"
            self.write(item.blocks, item.start, item.token_ids, salt)
        sampled: dict[ChoiceKey, SampledToken] = {}
        logprobs: dict[ChoiceKey, tuple[TokenLogprobs, ...]] = {}
        # Only after all writes: whoever wrote into a neighbour's block is found out.
        for item in scheduled:
            data, history = requests[item.key[0]], history_of(item.key)
            self._check(item, data, history)
            for draw in item.draws:
                assert item.start + len(item.token_ids) == len(history), "a draw before the end"
                sampled[draw.key] = self._draw(item, draw, data, history_of(draw.key))
            if item.prompt_logprobs is not None:
                first, last = item.prompt_logprobs
                assert item.start <= first < last <= item.start + len(item.token_ids)
                chain = self.contents(item.blocks, last)
                logprobs[item.key] = tuple(prompt_logprob(kv or 0) for kv in chain[first:])
        self._drawn = sampled
        return StepResult(sampled, logprobs)

    def _fill(self, item: ScheduledChoice) -> ScheduledChoice:
        if item.token_ids[-1] != PENDING:
            return item
        assert not item.sampling.needs_history
        assert PENDING not in item.token_ids[:-1]
        return replace(item, token_ids=(*item.token_ids[:-1], self._drawn[item.key].token_id))

    def _check(self, item: ScheduledChoice, data: GenerateRequest, history: Sequence[int]) -> None:
        stop = item.start + len(item.token_ids)
        assert list(item.token_ids) == list(history[item.start : stop]), "not the known tokens"
        assert tuple(item.prompt_token_ids) == data.prompt_token_ids
        expected = kv_chain(history[:stop], data.cache_salt)
        assert self.contents(item.blocks, stop) == expected, "a table holds another prefix"

    def _draw(
        self, item: ScheduledChoice, draw: Draw, data: GenerateRequest, history: Sequence[int]
    ) -> SampledToken:
        outputs = list(history[len(data.prompt_token_ids) :])
        assert draw.output_index == len(outputs)
        assert list(draw.output_token_ids) == (outputs if data.sampling.needs_history else [])
        kv = self.read(item.blocks, item.start + len(item.token_ids) - 1)
        assert kv is not None
        token = draw_token(kv, data.sampling.seed, draw.key[1], draw.output_index)
        return SampledToken(token)


class FakeHost:
    """Slots of host memory whose copies take a number of steps, and fail where told to.

    A save reads its block when it ends, a restore leaves rubbish in its block until then:
    whoever frees, writes or reads a block too early is found out.
    """

    def __init__(
        self,
        device: FakeDevice,
        num_slots: int,
        copy_steps: int,
        fails: Callable[[], bool],
        copy_s: float,
    ) -> None:
        self.device = device
        self.slots: list[tuple[bytes, list[int | None]] | None] = [None] * num_slots
        self.copy_steps = copy_steps
        self._fails = fails
        self._copy_s = copy_s
        self._under_way: list[tuple[int, Save | Restore, list[int | None]]] = []

    def start(self, copies: Sequence[Save | Restore]) -> None:
        for copy in copies:
            if isinstance(copy, Save):
                content = list(self.device.slots[copy.block])
                self.slots[copy.slot] = None
            else:
                held = self.slots[copy.source[1]]
                assert held is not None, "a restore of what was not saved"
                assert held[0] == copy.digest, "a restore of another content"
                content = held[1]
                self.device.slots[copy.block] = [-1] * self.device.block_size
            self._under_way.append((self.copy_steps, copy, content))

    def ended(self) -> list[EndedCopy]:
        due = [entry for entry in self._under_way if entry[0] == 0]
        self._under_way = [(n - 1, copy, content) for n, copy, content in self._under_way if n]
        return [self._end(copy, content) for _, copy, content in due]

    def _end(self, copy: Save | Restore, content: list[int | None]) -> EndedCopy:
        ok = not self._fails()
        if isinstance(copy, Save):
            assert self.device.slots[copy.block] == content, "written while a save read it"
            if ok:
                self.slots[copy.slot] = (copy.digest, content)
        else:
            rubbish = [-1] * self.device.block_size
            assert self.device.slots[copy.block] == rubbish, "written while a restore filled it"
            assert self.slots[copy.source[1]] == (copy.digest, content), "overwritten while read"
            if ok:
                self.device.slots[copy.block] = list(content)
        return EndedCopy(copy, ok, self._copy_s)
