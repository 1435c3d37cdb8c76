"""Request bodies. A null stands for the default, everywhere."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cluster.openai.limits import (
    MAX_LABEL_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

INT64_MAX = 2**63 - 1


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


TokenIds = Annotated[list[int], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[
    list[StopString],
    Field(
        max_length=MAX_STOP_STRINGS,
        fail_fast=True,
        description="a string or a list of strings",
    ),
    BeforeValidator(_as_list),
]


class Body(BaseModel):
    """Base of all objects in requests: strict types, nothing unknown."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    no_ops: ClassVar[frozenset[str]] = frozenset()
    """Parameters that are taken and change nothing."""
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Parameters that are known and refused, save for the values that ask for nothing."""


class RequestBody(Body):
    """Base of all bodies."""

    model: str | None = None


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool = False
    """One more chunk before the end, without choices, has the usage of the whole request."""
    continuous_usage_stats: bool = False
    """With `include_usage`, every chunk has the usage so far."""


class GenerationBody(RequestBody):
    """What completions and chat share."""

    no_ops = frozenset(
        {
            "user",
            "store",
            "metadata",
            "service_tier",
            "parallel_tool_calls",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
        }
    )
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "response_format": ({"type": "text"},),
        "tools": ([],),
        "tool_choice": ("none",),
        "functions": ([],),
        "function_call": ("none",),
        "best_of": (1,),
        "bad_words": ([],),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": ([],),
        "guided_grammar": (),
        "logits_processors": ([],),
    }

    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    """0 and -1 keep all tokens, as does any number beyond the vocabulary."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[str, Any], Field(max_length=MAX_LOGIT_BIAS)] = {}
    allowed_token_ids: TokenIds | None = None
    stop: StopStrings = []
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)] = []
    include_stop_str_in_output: bool = False
    """Of a stop token's text, too."""
    ignore_eos: bool = False
    seed: Annotated[int | None, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    """Keep that many tokens from the prompt's end; -1 keeps what the context has room for."""
    return_token_ids: bool = False
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] = 0
    """Lower is served first."""
    timeout_s: Annotated[float | None, Field(gt=0)] = None
    """Seconds from arrival in which the request must be complete, or it ends with an error."""
    cache_salt: Annotated[str, Field(max_length=MAX_LABEL_CHARS)] = ""
    request_id: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=MAX_LABEL_CHARS,
            pattern=r"^[!-~]+$",
            description="a string of visible ASCII characters",
        ),
    ] = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    unsupported = GenerationBody.unsupported | {"suffix": ("",)}

    prompt: Any
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    echo: bool = False
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    """0 reports the drawn token alone."""
    add_special_tokens: bool = True


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    unsupported = GenerationBody.unsupported | {
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "moderation": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "documents": ([],),
    }

    messages: Annotated[list[Any], Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    add_generation_prompt: bool | None = None
    """By default yes, unless the final message is to be continued."""
    continue_final_message: bool = False


class TokenizeBody(RequestBody):
    """POST /tokenize: a prompt or messages."""

    prompt: str | None = None
    messages: Annotated[list[Any] | None, Field(min_length=1)] = None
    add_special_tokens: bool = True
    """For a prompt; a chat template writes its own."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    tokens: TokenIds
