"""Sampling parameters of one choice, from a request body."""

from __future__ import annotations

import re
import secrets
from typing import Any

from cluster.openai.errors import bad_request
from cluster.openai.prompts import check_token_ids
from cluster.openai.schema import GenerationBody
from cluster.openai.service import Service
from cluster.openai.validation import shown
from replicas.core.sampling_params import SamplingParams

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; chat's is what is left of the context."""
MAX_BIAS = 100.0
_UINT64 = 2**64 - 1
_INTEGER = re.compile(r"-?[0-9]{1,18}")


def requested_max_tokens(body: GenerationBody) -> int | None:
    """`max_tokens` or `max_completion_tokens`, its newer name."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_request(
            f"max_tokens ({old}) and max_completion_tokens ({new}) must not differ", "max_tokens"
        )
    return old if new is None else new


def max_output_tokens(
    body: GenerationBody, prompt_tokens: int, max_model_len: int, default: int | None
) -> int:
    """Output tokens at the most; `default` (None: all there is room for) where none were asked
    for. Raises ApiError 400 where prompt and output do not fit into the context."""
    room = max_model_len - prompt_tokens
    asked = requested_max_tokens(body)
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise bad_request(
            f"max_tokens is {asked} and the prompt has {prompt_tokens} tokens, {asked} + "
            f"{prompt_tokens} = {asked + prompt_tokens} in all; the context holds {max_model_len}",
            "max_tokens",
            "context_length_exceeded",
        )
    return asked


def sampling_params(
    body: GenerationBody,
    service: Service,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Raises ApiError 400 for what cannot be sampled with this model's vocabulary."""
    if body.min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens must be at most max_tokens ({max_tokens}), got {body.min_tokens}",
            "min_tokens",
        )
    check_token_ids(body.stop_token_ids, service.vocab_size, "stop_token_ids")
    # No draw depends on numbers beyond the vocabulary, so that 10 million is as good as none.
    top_k = body.top_k if 0 < body.top_k < service.vocab_size else 0
    return SamplingParams(
        max_tokens=max_tokens,
        seed=draw_seed(body.seed),
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias, service.vocab_size),
        allowed_token_ids=_allowed(body.allowed_token_ids, service.vocab_size),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def draw_seed(seed: int | None) -> int:
    """The client's signed seed as an unsigned one; a random one where there is none."""
    return secrets.randbits(64) if seed is None else seed & _UINT64


def _allowed(token_ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if not token_ids:
        raise bad_request("allowed_token_ids must not be empty", "allowed_token_ids")
    check_token_ids(token_ids, vocab_size, "allowed_token_ids")
    return tuple(dict.fromkeys(token_ids))


def _logit_bias(biases: dict[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    checked = {}
    for key, bias in biases.items():
        token_id = int(key) if _INTEGER.fullmatch(key) else -1
        if not 0 <= token_id < vocab_size:
            raise bad_request(
                f"logit_bias keys must be token ids from 0 to {vocab_size - 1}, got {shown(key)}",
                "logit_bias",
            )
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        # NaN fails every comparison.
        if not (number and -MAX_BIAS <= bias <= MAX_BIAS):
            raise bad_request(
                f"logit_bias[{shown(key)}] must be a number from -100 to 100, got {shown(bias)}",
                "logit_bias",
            )
        checked[token_id] = float(bias)
    return tuple(checked.items())
