"""A request and its choices. A choice is the unit of scheduling, blocks and preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from replicas.core.sampling_params import SamplingParams
from replicas.protocol import ChoiceProgress, GenerateRequest, Receipt, TokenLogprobs

ChoiceKey = tuple[str, int]
"""(request id, choice index)."""

Rank = tuple[int, int, int]
"""(class, arrival number, choice index): lower is served first and preempted last."""


class ChoiceState(Enum):
    """Where a choice is. PENDING: its request's prompt is still being prefilled by the leader."""

    PENDING = auto()
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True)
class Resume:
    """What a preemption was predicted to cost until the choice has caught up, and did so far."""

    swapped: bool
    predicted_s: float
    insists: bool = False
    """What the host keeps is copied back whatever that costs."""
    shared_blocks: int = 0
    """Leading blocks that others held as well."""
    own_blocks: int = 0
    """Cached ones behind these."""
    actual_s: float = 0.0
    stall_s: float = 0.0


class Choice:
    """A list of token ids and a count of computed ones that chases it.

    First prefill, a chunk, a prefix hit, decode and resuming after a preemption are one
    case: tokens `num_computed_tokens .. num_known_tokens` are still to be computed.
    Token history is append-only and survives every preemption; blocks do not.
    """

    def __init__(self, request: Request, index: int, rank: Rank) -> None:
        self.request = request
        self.index = index
        self.rank = rank
        self.key: ChoiceKey = (request.id, index)
        self.state = ChoiceState.PENDING
        self.epoch = 0
        """Number of the last admission. No other choice of the replica ever has the same: results
        of another epoch are dropped."""
        self.preemptions = 0
        self.output_token_ids: list[int] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        """For prompt tokens 1, 2, ... as far as they are known."""

        self.num_computed_tokens = 0
        """Those whose step has ended."""
        self.in_flight_tokens = 0
        """Tokens that steps in flight compute."""
        self.in_flight_draws = 0
        """Tokens that steps in flight draw: the next of the history, but not known yet."""
        self.blocks: list[int] = []
        self.block_hashes: list[bytes] = []
        """Digests of the known tokens' full blocks, extended when needed."""
        self.num_published_blocks = 0
        self.num_found_blocks = 0
        """Leading blocks that were on the device already, so that others may share them."""

        self.host_blocks: set[bytes] = set()
        """Digests of blocks that the host tier keeps for this choice."""
        self.arriving: dict[int, int] = {}
        """Blocks that are being filled from host memory, with their index in `blocks`."""
        self.arrived: set[int] = set()
        """Indices of those that have been filled."""
        self.awaits_arrival = False
        """Another choice is getting a block from host memory that this one is to share."""
        self.arrival_deadline = 0.0
        """When it has waited too long for its own arrivals, or for those of others."""
        self.shuns_host = False
        """What it waited for came late: the next admission computes instead."""
        self.resume: Resume | None = None

        self.progress = 0
        """Tokens produced since the last admission."""
        self.high_water = 0
        """The most tokens ever computed: below it, computing is recomputing."""
        self.cached_tokens = 0
        self.host_cached_tokens = 0
        self.swaps = 0
        self.recomputed_tokens = 0
        self.restored_tokens = 0
        self.stall_s = 0.0
        self.preempted_at: float | None = None
        self.wait_told_at: float | None = None
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self.request.data.sampling

    @property
    def returns(self) -> bool:
        """Whether the choice had KV before that it lost: here, or on another replica."""
        return self.preemptions > 0 or bool(self.request.data.progress)

    @property
    def num_known_tokens(self) -> int:
        return self.request.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens that are still to be computed."""
        return self.num_known_tokens - self.num_computed_tokens

    @property
    def num_given_tokens(self) -> int:
        """Tokens that are computed or in flight: the position of the next to be scheduled."""
        return self.num_computed_tokens + self.in_flight_tokens

    @property
    def num_coming_tokens(self) -> int:
        """Known tokens, and those that are being drawn."""
        return self.num_known_tokens + self.in_flight_draws

    @property
    def num_schedulable_tokens(self) -> int:
        """Tokens that a step can be given now, known or being drawn."""
        return self.num_coming_tokens - self.num_given_tokens

    def take_over(self, progress: ChoiceProgress) -> None:
        """Begin where another replica was lost: all but the last known token were computed."""
        self.output_token_ids += progress.output_token_ids
        if progress.finished:
            self.state = ChoiceState.FINISHED
        if progress.output_token_ids:
            self.high_water = self.num_known_tokens - 1

    @property
    def num_kept_tokens(self) -> int:
        """Tokens whose KV a copy that is queued now will find: it comes behind what is in flight.
        The last known one is to be computed again in any case, for its logits."""
        return min(self.num_given_tokens, self.num_known_tokens - 1)

    @property
    def needs_last_token(self) -> bool:
        """Whether nothing can be scheduled before the token being drawn is known: the next draw
        depends on it, or the other choices are to fork off here."""
        return self.sampling.needs_history or not self.request.forked

    def give(self, num_tokens: int, num_draws: int) -> None:
        """A step that computes `num_tokens` and draws `num_draws` is on its way."""
        self.in_flight_tokens += num_tokens
        self.in_flight_draws += num_draws

    def take(self, num_tokens: int, num_draws: int) -> None:
        """That step has ended."""
        self.in_flight_tokens -= num_tokens
        self.in_flight_draws -= num_draws
        self.num_computed_tokens += num_tokens

    def lose_blocks(self) -> None:
        """Nothing of it is on the device any more, and no result will be taken."""
        self.blocks = []
        self.num_computed_tokens = self.num_published_blocks = 0
        self.in_flight_tokens = self.in_flight_draws = 0

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Known token ids of positions start..stop."""
        prompt = self.request.data.prompt_token_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        outputs = self.output_token_ids[max(0, start - len(prompt)) : stop - len(prompt)]
        return [*prompt[start:], *outputs]

    def receipt(self) -> Receipt:
        """What serving this choice took so far."""
        waited = 0.0 if self.scheduled_at is None else self.scheduled_at - self.request.arrived_at
        return Receipt(
            cached_tokens=self.cached_tokens,
            host_cached_tokens=self.host_cached_tokens,
            preemptions=self.preemptions,
            swaps=self.swaps,
            recomputed_tokens=self.recomputed_tokens,
            restored_tokens=self.restored_tokens,
            stall_s=self.stall_s,
            queue_s=waited,
        )


class Request:
    """A client's prompt; groups the output of its `n` choices.

    Until the prompt has been prefilled once, only the leader (the first unfinished choice)
    is scheduled; then all choices draw their first token from the same logits. A request that
    was lost elsewhere has that behind it: its choices come back one by one.
    """

    def __init__(self, data: GenerateRequest, *, rank: tuple[int, int], arrived_at: float) -> None:
        self.data = data
        self.id = data.request_id
        self.num_prompt_tokens = len(data.prompt_token_ids)
        self.arrived_at = arrived_at
        self.forked = data.n == 1 or bool(data.progress)
        self.choices = [Choice(self, index, (*rank, index)) for index in range(data.n)]
        for choice, progress in zip(self.choices, data.progress, strict=False):
            choice.take_over(progress)

    def live_choices(self) -> list[Choice]:
        """The choices that have not finished."""
        return [c for c in self.choices if c.state is not ChoiceState.FINISHED]
