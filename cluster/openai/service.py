"""What the HTTP front needs from the rest of the cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.tokenizer import Tokenizer
from replicas.protocol import GenerateRequest, TokenDelta


class BackendError(Exception):
    """The backend failed to serve a request; the message is shown to the client."""


class QueueFull(BackendError):  # noqa: N818 - a condition, not a fault
    """No replica takes another request now; trying again in `retry_after_s` seconds may help."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlinePassed(BackendError):  # noqa: N818 - a condition, not a fault
    """The request was not complete in time."""

    def __init__(self, limit_s: float, *, asked: bool) -> None:
        """`asked`: whether the limit is the client's own."""
        whose = "its timeout_s" if asked else "this server's limit"
        super().__init__(f"the request was not complete within {whose} of {limit_s:g} s")
        self.asked = asked


class DeltaStream(Protocol):
    """Deltas of all choices of one request, as the engine's steps bring them."""

    def __aiter__(self) -> AsyncIterator[Sequence[TokenDelta]]: ...

    async def __anext__(self) -> Sequence[TokenDelta]: ...

    async def aclose(self) -> None:
        """Abort every choice that still runs and free what the stream holds."""


class Backend(Protocol):
    """Whatever turns a GenerateRequest into tokens: one engine, or a routed cluster."""

    def generate(self, request: GenerateRequest) -> DeltaStream:
        """Start `request`. Raises QueueFull or another BackendError here or while iterating."""

    def abort(self, request_id: str, choice: int) -> None:
        """End one choice whose text is complete. Its last delta should still follow, with
        `FinishReason.ABORT` and the receipt; one that is already over is no error."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that are the operator's choice; each refusal names its limit."""

    max_body_bytes: int = 4 * 2**20
    max_prompts: int = 1024
    """Prompts in one completions request."""
    max_choices: int = 2048
    """Prompts times `n` in one request."""
    request_timeout_s: float | None = None
    """How long a request may take from its arrival, waiting included; None: any time."""
    receipt_wait_s: float = 1.0
    """How long a finished request waits for the receipts of choices that it aborted."""


@dataclass(frozen=True, slots=True)
class Service:
    """One served model, as the HTTP front sees it."""

    model_names: tuple[str, ...]
    """Names that requests may use; the first is the one that responses bear."""
    max_model_len: int
    """Prompt and output tokens of one choice at the most."""
    kv_pool_tokens: int
    """Tokens whose KV the usable pool of one replica can hold."""
    vocab_size: int
    """Token ids that the model knows: 0 .. vocab_size - 1."""
    tokenizer: Tokenizer
    backend: Backend
    metrics: Callable[[], Awaitable[bytes]]
    """The Prometheus exposition text."""
    health: Callable[[], Awaitable[tuple[bool, Mapping[str, Any]]]]
    """Whether steps are made, and details in JSON's types."""
    version: str
    created: int
    """Unix seconds, shown by /v1/models."""
    limits: Limits = field(default_factory=Limits)
    note_timeout: Callable[[], None] = lambda: None
    """Told of each request that its deadline has ended."""
