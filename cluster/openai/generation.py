"""One completions or chat request, ready to be run."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.journal import Journal, TextOptions
from cluster.openai.chat import chat_prompt
from cluster.openai.client_headers import ClientHeaders
from cluster.openai.errors import bad_request, model_not_found
from cluster.openai.prompts import Prompt, echo_pieces, fit_prompt, read_prompts
from cluster.openai.sampling import (
    COMPLETION_MAX_TOKENS,
    draw_seed,
    max_output_tokens,
    requested_max_tokens,
    sampling_params,
)
from cluster.openai.schema import ChatBody, CompletionBody, GenerationBody
from cluster.openai.service import Service
from cluster.openai.validation import parse_body
from replicas.protocol import GenerateRequest


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request: its journals, one a prompt, and how to answer."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    journals: tuple[Journal, ...]
    chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: int | None
    """Alternatives to show for each token; None shows no logprobs."""
    prompt_logprobs: int | None
    return_token_ids: bool
    timeout_s: float | None
    """What the client allows, seconds from arrival."""

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return self.journals[0].request.n

    @property
    def finished(self) -> bool:
        """Whether every choice is complete for the client."""
        return all(journal.finished for journal in self.journals)


def completion(raw: bytes, service: Service, headers: ClientHeaders) -> Generation:
    """POST /v1/completions. Raises ApiError."""
    body = parse_body(raw, CompletionBody)
    _check(body, service)
    keep = _keep(body, service)
    prompts = read_prompts(
        body.prompt,
        service,
        add_special_tokens=body.add_special_tokens,
        must_fit=keep is None,
    )
    if len(prompts) * body.n > service.limits.max_choices:
        raise bad_request(
            f"n x prompts is {body.n} x {len(prompts)} = {body.n * len(prompts)}; at most "
            f"{service.limits.max_choices} choices go in one request",
            "n",
        )
    names = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]
    fitted = [
        fit_prompt(prompt, service, name, keep) for prompt, name in zip(prompts, names, strict=True)
    ]
    return _generation("cmpl", body, service, headers, fitted, body.logprobs)


def chat(raw: bytes, service: Service, headers: ClientHeaders) -> Generation:
    """POST /v1/chat/completions. Raises ApiError."""
    body = parse_body(raw, ChatBody)
    _check(body, service)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    keep = _keep(body, service)
    rendered = chat_prompt(body, service, must_fit=keep is None)
    prompt = fit_prompt(rendered, service, "messages", keep)
    logprobs = body.top_logprobs if body.logprobs else None
    return _generation("chatcmpl", body, service, headers, [prompt], logprobs)


def check_model(name: str | None, service: Service) -> None:
    """Raises ApiError 404 for a model that is not served."""
    if name is not None and name not in service.model_names:
        raise model_not_found(name)


def _check(body: GenerationBody, service: Service) -> None:
    check_model(body.model, service)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")


def _keep(body: GenerationBody, service: Service) -> int | None:
    if body.truncate_prompt_tokens != -1:
        return body.truncate_prompt_tokens
    return max(1, service.max_model_len - (requested_max_tokens(body) or 1))


def _generation(
    kind: str,
    body: GenerationBody,
    service: Service,
    headers: ClientHeaders,
    prompts: Sequence[Prompt],
    logprobs: int | None,
) -> Generation:
    public_id = f"{kind}-{body.request_id or headers.request_id or secrets.token_hex(16)}"
    # Clients may send one id twice; the engine must never see it twice.
    unique = f"{public_id}-{secrets.token_hex(8)}"
    stream_options = body.stream_options
    include_usage = stream_options is not None and stream_options.include_usage
    return Generation(
        id=public_id,
        created=int(time.time()),
        model=body.model or service.model_names[0],
        journals=_journals(unique, body, service, prompts, logprobs, explain=headers.explain),
        chat=isinstance(body, ChatBody),
        stream=body.stream,
        include_usage=include_usage,
        continuous_usage=(
            stream_options is not None and include_usage and stream_options.continuous_usage_stats
        ),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=body.return_token_ids,
        timeout_s=body.timeout_s,
    )


def _journals(
    unique_id: str,
    body: GenerationBody,
    service: Service,
    prompts: Sequence[Prompt],
    logprobs: int | None,
    *,
    explain: bool,
) -> tuple[Journal, ...]:
    echo = isinstance(body, CompletionBody) and body.echo
    default = None if isinstance(body, ChatBody) else COMPLETION_MAX_TOKENS
    max_tokens = [
        max_output_tokens(body, len(prompt.token_ids), service.max_model_len, default)
        for prompt in prompts
    ]
    shared = sampling_params(
        body,
        service,
        max_tokens=min(max_tokens),
        logprobs=logprobs,
        prompt_logprobs=_most(body.prompt_logprobs, logprobs if echo else None),
    )
    journals = []
    for index, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True)):
        request = GenerateRequest(
            request_id=f"{unique_id}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling=replace(shared, max_tokens=limit, seed=draw_seed(body.seed)),
            n=body.n,
            priority=body.priority,
            cache_salt=body.cache_salt,
            explain=explain,
        )
        options = TextOptions(
            stops=tuple(dict.fromkeys(body.stop)),
            include_stop=body.include_stop_str_in_output,
            echo=echo_pieces(prompt, service.tokenizer) if echo else None,
        )
        journals.append(Journal(request, service.tokenizer, options))
    return tuple(journals)


def _most(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)
