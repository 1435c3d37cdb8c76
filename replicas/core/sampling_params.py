"""How the tokens of one choice are drawn and when it ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling parameters; the ingress owns defaults and error messages.

    `seed` is always set: where the client sent none, the ingress draws one, so that
    every token is a pure function of (seed, choice index, output index) and logits.
    """

    max_tokens: int
    """Output tokens at the most, >= 1."""
    seed: int
    """Unsigned 64-bit."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens cannot be drawn before this many output tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Multiplicative, over prompt and output tokens (> 0; 1 is off)."""
    presence_penalty: float = 0.0
    """Additive, over output tokens."""
    frequency_penalty: float = 0.0
    """Additive for each occurrence, over output tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these can be drawn; empty allows all."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Top alternatives to report for each output token; 0 reports the drawn token alone,
    None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on which tokens came before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
