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
    """What serving one choice took; sent with its last delta."""

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
    error: str | None = None
    """What went wrong, with `FinishReason.ERROR`."""


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


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Where an ingress listens for the deltas of its requests."""

    host: str
    port: int
    token: str
    """Proves that who connects is a replica the ingress called."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says of itself."""

    replica_id: str
    engine: EngineInfo
    snapshot: ReplicaSnapshot
    failure: str | None
    """Why the replica is unhealthy; None while it is not."""
