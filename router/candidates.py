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
_GUESSED_STEP_S = 0.03
"""Of a decoding step, while nobody has made one."""


class Typical(NamedTuple):
    """What stands in for a figure that a replica has not measured yet: the mean of the others,
    or a guess at a modest machine."""

    prefill_tokens_per_s: float = _GUESS.prefill_tokens
    read_bytes_per_s: float = _GUESS.read_bytes
    decode_step_s: float = _GUESSED_STEP_S

    @classmethod
    def of(cls, states: Iterable[ReplicaState]) -> Typical:
        """From those that measured."""
        prefill, read, step = [], [], []
        for state in states:
            load = state.load
            prefill.append(load.prefill_tokens_per_s)
            read.append(load.read_bytes_per_s)
            step.append(load.decode_step_s)
        return cls(
            _mean(prefill) or _GUESS.prefill_tokens,
            _mean(read) or _GUESS.read_bytes,
            _mean(step) or _GUESSED_STEP_S,
        )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0


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
            book.settle(replica, state.previous_at)
            hit = hits.get(replica, NO_HIT)
            found.append(_known(state, hit, book.unseen(replica), work, typical))
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
    )


def _known(state: ReplicaState, hit: Hit, unseen: Work, work: Work, typical: Typical) -> Candidate:
    load, engine = state.load, state.greeting.engine
    size, tokens = engine.block_size, work.prefill_tokens
    # One token is always computed, and what is read from the host stops short of it too.
    device = min(hit.device * size, tokens - 1)
    host = min(hit.host * size, tokens - 1 - device)
    block_bytes = engine.block_bytes or 1
    queued = load.queued_tokens + unseen.prefill_tokens
    outputs = load.expected_tokens + unseen.output_tokens + work.output_tokens
    return Candidate(
        replica=state.greeting.replica_id,
        queued_tokens=queued,
        running=load.running + unseen.choices,
        in_flight=load.running + load.waiting + unseen.choices,
        device_tokens=device,
        host_tokens=host,
        uncached_tokens=tokens - device - host,
        filled_tokens=load.used_blocks * size + queued + tokens + outputs,
        kv_tokens=engine.kv_tokens,
        prefill_tokens_per_s=load.prefill_tokens_per_s or typical.prefill_tokens_per_s,
        read_tokens_per_s=(load.read_bytes_per_s or typical.read_bytes_per_s) * size / block_bytes,
        written_tokens_per_s=load.written_bytes_per_s * size / block_bytes
        if engine.host_blocks
        else 0.0,
        decode_step_s=load.decode_step_s or typical.decode_step_s,
        preemptions_per_s=state.preemptions_per_s,
    )
