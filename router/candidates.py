"""What the states, the bookings and the index say of each replica, as the policies take it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from replicas.core.cost_model import Rates
from router.load_book import LoadBook, Work
from router.policies.policy import Candidate
from router.prefix_index import NO_HIT, Hit
from router.replica_states import ReplicaState

_GUESS = Rates()
HALF_SPEED_BATCH = 64
"""Choices at which a decode step is taken to last twice as long as with none, until the replica
has measured what one more choice adds: step / (64 + running)."""
_GUESSED_STEP_S = 0.03
"""Of a decoding step, while nobody has made one."""


class Typical(NamedTuple):
    """What stands in for a figure that a replica has not measured yet: the mean of the others,
    or a guess at a modest machine."""

    prefill_tokens_per_s: float = _GUESS.prefill_tokens
    read_bytes_per_s: float = _GUESS.read_bytes
    decode_step_s: float = _GUESSED_STEP_S
    decode_choice_s: float = 0.0
    """0 where nobody has measured it. The mean of all stands for each: a slope is measured less
    well than a rate, and one that is too low by chance would draw all the load."""

    @classmethod
    def of(cls, states: Iterable[ReplicaState]) -> Typical:
        """From those that measured."""
        loads = [state.load for state in states]
        return cls(
            _mean([load.prefill_tokens_per_s for load in loads]) or _GUESS.prefill_tokens,
            _mean([load.read_bytes_per_s for load in loads]) or _GUESS.read_bytes,
            _mean([load.decode_step_s for load in loads]) or _GUESSED_STEP_S,
            _mean([load.decode_choice_s for load in loads]),
        )


def _mean(values: Sequence[float]) -> float:
    total = sum(values)
    return total / sum(map(bool, values)) if total else 0.0


def candidates(
    replicas: Sequence[str],
    states: Mapping[str, ReplicaState],
    hits: Mapping[str, Hit],
    book: LoadBook,
    work: Work,
) -> list[Candidate]:
    """`states`: of the fresh ones; `work`: the request's own if nothing of it is cached."""
    typical = Typical.of(states.values())
    found = []
    for replica in replicas:
        state = states.get(replica)
        if state is None:
            found.append(_unknown(replica, book.all(replica), work, typical))
        else:
            unseen = book.unseen(replica, state.previous_at)
            found.append(_known(state, hits.get(replica, NO_HIT), unseen, work, typical))
    return found


def _unknown(replica: str, booked: Work, work: Work, typical: Typical) -> Candidate:
    """One without a word of late: what was sent there is all there, and nothing is cached."""
    return Candidate(
        replica=replica,
        fresh=False,
        queued_tokens=booked.prefill_tokens,
        running=booked.choices,
        in_flight=booked.choices,
        uncached_tokens=work.prefill_tokens,
        prefill_tokens_per_s=typical.prefill_tokens_per_s,
        decode_step_s=typical.decode_step_s,
        decode_choice_s=typical.decode_choice_s
        or typical.decode_step_s / (HALF_SPEED_BATCH + booked.choices),
    )


def _known(state: ReplicaState, hit: Hit, unseen: Work, work: Work, typical: Typical) -> Candidate:
    load, engine = state.load, state.greeting.engine
    size, tokens = engine.block_size, work.prefill_tokens
    device = host = 0
    if hit is not NO_HIT:
        # One token is always computed, and what is read from the host stops short of it too.
        device = min(hit.device * size, tokens - 1)
        host = min(hit.host * size, tokens - 1 - device)
    queued = load.queued_tokens + unseen.prefill_tokens
    running = load.running + unseen.choices
    outputs = load.expected_tokens + unseen.output_tokens + work.output_tokens
    tokens_a_byte = size / (engine.block_bytes or 1)
    step_s = load.decode_step_s or typical.decode_step_s
    # By position: a thousand of these with keywords take half a millisecond more.
    return Candidate(
        state.greeting.replica_id,
        True,
        queued,
        running,
        running + load.waiting,
        device,
        host,
        tokens - device - host,
        load.used_blocks * size + queued + tokens + outputs,
        engine.num_blocks * size,
        load.prefill_tokens_per_s or typical.prefill_tokens_per_s,
        (load.read_bytes_per_s or typical.read_bytes_per_s) * tokens_a_byte,
        load.written_bytes_per_s * tokens_a_byte if engine.host_blocks else 0.0,
        step_s,
        typical.decode_choice_s or step_s / (HALF_SPEED_BATCH + running),
        state.preemptions_per_s,
    )
