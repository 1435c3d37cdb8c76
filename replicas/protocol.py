"""What a router or an ingress may know of a replica: plain values that travel.

Token ids only: text is the ingress' business. All classes are frozen, hold nothing but
numbers, strings and tuples, and import neither torch nor ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from replicas.core.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ChoiceProgress:
    """How far a choice had come when its replica was lost. Prompt and output stay apart, so
    that limits, sampling, penalties and stop tokens need no rebasing."""

    output_token_ids: tuple[int, ...] = ()
    finished: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt with its `n` choices, as a replica takes it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    """Lower is served first (with `scheduling_policy: priority`)."""
    cache_salt: str = ""
    """Requests share prefix blocks only where the salts are equal."""
    progress: tuple[ChoiceProgress, ...] = ()
    """What each choice had produced on another replica, where this one takes over."""
    explain: bool = False
    """Whether the router is to say why it chose the replica."""

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """What a replica has to have KV for before it draws anything: the prompt, and what the
        only choice that goes on had produced elsewhere. Of several choices, the prompt alone."""
        going = [each for each in self.progress if not each.finished]
        if len(going) != 1:
            return self.prompt_token_ids
        return self.prompt_token_ids + going[0].output_token_ids


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token: natural log, of the model's raw logits (before bias,
    penalties, temperature and truncation), so that they are always finite."""

    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), likeliest first."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What serving one choice took so far."""

    cached_tokens: int = 0
    """Prompt tokens whose KV the first admission found on the device."""
    host_cached_tokens: int = 0
    """Prompt tokens whose KV the first admission found in the host tier."""
    preemptions: int = 0
    swaps: int = 0
    """Those of the preemptions that kept the KV in the host tier; the rest threw it away."""
    recomputed_tokens: int = 0
    """Tokens that had been computed before a preemption and were computed again."""
    restored_tokens: int = 0
    """Tokens whose KV came back from the host tier after a preemption."""
    stall_s: float = 0.0
    """Seconds from each preemption until the choice could compute anew."""
    queue_s: float = 0.0
    """Seconds from arrival to the first scheduled token."""
    failovers: int = 0
    """Times that another replica took over because one was lost."""
    moves: int = 0
    """Times that another replica took over because this choice had to wait for KV."""
    placements: tuple[str, ...] = ()
    """Why each replica was chosen (JSON), where the request asked for it."""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one engine step added to one choice."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token where `SamplingParams.logprobs` is set, else empty."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """With the first delta of choice 0 where asked for: one for each prompt token but the first."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the choice, where one did (it is the last of `token_ids`)."""
    receipt: Receipt | None = None
    """With the first delta, the first after each preemption, the last, and a wait's."""
    wait_s: float | None = None
    """Without tokens: the request was preempted, and will wait here about as long."""
    error: str | None = None
    """What went wrong, with `FinishReason.ERROR`."""
    replica_failed: bool = False
    """Whether that was the replica's fault, so that another one can go on."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a replica's engine turned out to be once it was built."""

    device: str
    dtype: str
    kv_dtype: str
    block_size: int
    """Tokens a block holds."""
    num_blocks: int
    """Usable blocks of the KV pool."""
    max_model_len: int
    """Tokens a choice may reach."""
    vocab_size: int
    block_bytes: int = 0
    """Bytes of a block's KV over all layers."""
    host_blocks: int = 0
    """Blocks the host tier holds; 0 without one."""
    fingerprint: str = ""
    """Of the model's weights: with `kv_dtype`, `kv_scales` and `block_size` it keys block
    digests."""
    kv_scales: str = ""
    """Digest of the scales of an fp8 pool; empty for others."""

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV pool holds."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """What goes on in a replica between two steps."""

    running: int = 0
    """Choices that hold blocks."""
    waiting: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    pending_tokens: int = 0
    """Tokens of running and waiting choices that are still to be computed."""
    empty_slots: int = 0
    """Token slots of used blocks that hold no token."""
    host_blocks: int = 0
    """Blocks in the host tier, being written included."""
    pinned_host_blocks: int = 0
    """Those of them that preempted choices wait to get back."""
    copies: int = 0
    """Block copies between device and host that have not ended."""
    queued_tokens: int = 0
    """Tokens to prefill: pending ones without those of decoding choices and without what the
    device or the host tier has of them."""
    expected_tokens: int = 0
    """Output tokens that the running choices are expected to produce yet."""
    preemptions: int = 0
    """Since the replica's start."""
    prefill_tokens_per_s: float = 0.0
    """Measured, as the margin over a step that only decodes."""
    written_bytes_per_s: float = 0.0
    """Measured, device to host."""
    read_bytes_per_s: float = 0.0
    """Measured, host to device."""
    decode_step_s: float = 0.0
    """Measured, of a step that only decodes; 0 while there was none."""
    decode_choice_s: float = 0.0
    """Measured: what one more choice adds to it."""


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """What changed in the KV that can be found on a replica, by block digest.

    The net effect of one step: no digest is twice in one tier. Removing what is not there and
    storing what is there already are no errors.
    """

    stored: tuple[bytes, ...] = ()
    """Computed: on the device now."""
    restored: tuple[bytes, ...] = ()
    """Copied back from the host: on the device now."""
    removed: tuple[bytes, ...] = ()
    """Not on the device any more."""
    offloaded: tuple[bytes, ...] = ()
    """Written to the host tier, readable now."""
    dropped: tuple[bytes, ...] = ()
    """Not in the host tier any more."""
    cleared: bool = False
    """Both tiers were emptied before all of the above."""

    @property
    def empty(self) -> bool:
        """Whether nothing changed."""
        return self == _NO_EVENTS


_NO_EVENTS = BlockEvents()


@dataclass(frozen=True, slots=True)
class FeedGreeting:
    """Who publishes a feed: the first thing it says."""

    replica_id: str
    incarnation: str
    """Drawn when the replica started: a new one means that all KV known before is gone."""
    node_id: str
    """Replicas of one node can read each other's host tiers."""
    engine: EngineInfo


@dataclass(frozen=True, slots=True)
class FeedSnapshot:
    """All blocks that can be found on a replica after step `sequence`."""

    sequence: int
    device: tuple[bytes, ...]
    host: tuple[bytes, ...]
    load: ReplicaSnapshot


@dataclass(frozen=True, slots=True)
class FeedStep:
    """What happened since `sequence - 1`: one step, or a while in which none was made."""

    sequence: int
    events: BlockEvents
    load: ReplicaSnapshot


@dataclass(frozen=True, slots=True)
class FeedAddress:
    """Where a replica publishes its feed."""

    host: str
    port: int
    token: str
    """Proves that who connects belongs to the cluster: it travels through Ray alone."""


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Where an ingress listens for the deltas of its requests."""

    host: str
    port: int
    token: str
    """Proves that who connects is a replica the ingress called."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How one attempt at serving a request is sent out."""

    reply_to: ReplyAddress
    avoid: frozenset[str] = frozenset()
    """Replicas that are not to get it: they failed the request and may not be known to be dead
    yet, or have it already. They do get it if for a while nobody else is left."""
    within_s: float | None = None
    """The request runs elsewhere: it may move if a replica would be as quick as that."""
    declined: bool = False
    """None would: put in on the way. Whoever gets it, ends the call."""
    placement: str | None = None
    """Why the router chose the replica, where the request asks for it: JSON, put in on the
    way."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says of itself."""

    replica_id: str
    engine: EngineInfo
    snapshot: ReplicaSnapshot
    failure: str | None
    """Why the replica is unhealthy; None while it is not."""
