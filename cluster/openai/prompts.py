"""A prompt in any of its forms -> token ids that the model can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.openai.detokenizer import Detokenizer
from cluster.openai.errors import ApiError, bad_request
from cluster.openai.service import Service
from cluster.openai.validation import shown
from cluster.tokenizer import Tokenizer

_HEAD_CHARS_PER_TOKEN = 16
"""Hardly any text has so many: a head of that length tells whether the whole can fit."""
_FORMS = "a string, a list of strings, a list of token ids or a list of lists of token ids"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt."""

    token_ids: tuple[int, ...]
    text: str | None = None
    """As the client wrote it; None where it sent token ids."""


def read_prompts(
    value: Any, service: Service, *, add_special_tokens: bool, must_fit: bool
) -> list[Prompt]:
    """The prompts of one completions request, in order. Raises ApiError 400."""
    items, names = _split(value, service.limits.max_prompts)
    prompts = []
    for item, name in zip(items, names, strict=True):
        if isinstance(item, str):
            prompt = encode_text(
                item, service, name, add_special_tokens=add_special_tokens, must_fit=must_fit
            )
        else:
            prompt = _read_token_ids(item, name, service.vocab_size)
        prompts.append(prompt)
    return prompts


def encode_text(
    text: str, service: Service, param: str, *, add_special_tokens: bool, must_fit: bool
) -> Prompt:
    """A text as a prompt. One that no context can hold is refused before it is tokenised; with
    `must_fit`, one that clearly does not fit when only its head has been."""
    limit = service.max_model_len * service.tokenizer.max_token_chars
    if len(text) > limit:
        raise bad_request(
            f"{param} has {len(text)} characters; the context of {service.max_model_len} tokens "
            f"holds at most {limit}",
            param,
            "context_length_exceeded",
        )
    if must_fit:
        _refuse_by_head(text, service, param)
    ids = service.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return Prompt(tuple(ids), text)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises ApiError 400 for an id outside the model's vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        index, token_id = next(
            (i, each) for i, each in enumerate(token_ids) if not 0 <= each < vocab_size
        )
        raise bad_request(
            f"{param}[{index}] must be a token id from 0 to {vocab_size - 1}, got {token_id}", param
        )


def fit_prompt(prompt: Prompt, service: Service, param: str, keep: int | None) -> Prompt:
    """The prompt, cut to its last `keep` tokens where given. Raises ApiError 400 where it
    leaves no room for an output token, in the context or in the KV pool."""
    token_ids = prompt.token_ids
    if keep is not None and len(token_ids) > keep:
        prompt = Prompt(token_ids[len(token_ids) - keep :])
    count = len(prompt.token_ids)
    if count == 0:
        raise bad_request(f"{param} must not be empty: it has no tokens", param)
    if count >= service.max_model_len:
        raise _too_long(
            f"{param} has {count} tokens; at most {service.max_model_len - 1} fit into the context "
            f"of {service.max_model_len} tokens, as an output token needs one",
            param,
        )
    if count + 1 > service.kv_pool_tokens:
        raise _too_long(
            f"{param} has {count} tokens and needs KV for {count + 1}; the whole KV pool holds "
            f"{service.kv_pool_tokens} tokens",
            param,
        )
    return prompt


def echo_pieces(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str, ...]:
    """What each token adds to the prompt's text; joined, the text.

    The tokenizer's own first token adds nothing, and neither does a character that the prompt
    leaves unfinished, as the output may complete it.
    """
    detokenizer = Detokenizer(tokenizer, skips_special=False)
    own = prompt.text is not None and prompt.token_ids[0] == tokenizer.bos_token_id
    if own and not str(prompt.text).startswith(tokenizer.token_text(prompt.token_ids[0])):
        return ("", *map(detokenizer.push, prompt.token_ids[1:]))
    return tuple(map(detokenizer.push, prompt.token_ids))


def _refuse_by_head(text: str, service: Service, param: str) -> None:
    head = text[: _HEAD_CHARS_PER_TOKEN * service.max_model_len]
    if len(head) == len(text):
        return
    count = len(service.tokenizer.encode(head, add_special_tokens=False))
    # A cut changes how the last word is split, not twice the number of all tokens.
    if count > 2 * service.max_model_len:
        raise _too_long(
            f"{param} has more than {count} tokens; at most {service.max_model_len - 1} fit into "
            f"the context of {service.max_model_len} tokens, as an output token needs one",
            param,
        )


def _too_long(message: str, param: str) -> ApiError:
    return bad_request(message, param, "context_length_exceeded")


def _split(value: Any, max_prompts: int) -> tuple[list[Any], list[str]]:
    """The single prompts in `value` and what to call each in a message."""
    if isinstance(value, str):
        return [value], ["prompt"]
    if not isinstance(value, list):
        raise bad_request(f"prompt must be {_FORMS}, got {shown(value)}", "prompt")
    if not value:
        raise bad_request("prompt must not be empty", "prompt")
    if _is_token_list(value):
        return [value], ["prompt"]
    if len(value) > max_prompts:
        raise bad_request(
            f"prompt has {len(value)} prompts; at most {max_prompts} go in one request", "prompt"
        )
    return value, [f"prompt[{index}]" for index in range(len(value))]


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def _read_token_ids(value: Any, name: str, vocab_size: int) -> Prompt:
    if not isinstance(value, list):
        raise bad_request(f"{name} must be a string or a list of token ids", name)
    for index, item in enumerate(value):
        if type(item) is not int:
            raise bad_request(
                f"{name}[{index}] must be an integer, as in a list of token ids, got {shown(item)}",
                name,
            )
    check_token_ids(value, vocab_size, name)
    return Prompt(tuple(value))
