"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from cluster.openai.chat import chat_prompt
from cluster.openai.errors import bad_request
from cluster.openai.generation import check_model
from cluster.openai.prompts import check_token_ids, encode_text
from cluster.openai.schema import DetokenizeBody, TokenizeBody
from cluster.openai.service import Service
from cluster.openai.validation import parse_body


def tokenize(raw: bytes, service: Service) -> dict[str, Any]:
    """Token ids of a prompt or of messages. Raises ApiError."""
    body = parse_body(raw, TokenizeBody)
    check_model(body.model, service)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("one of prompt and messages is required, and not both", "prompt")
    if body.prompt is None:
        prompt = chat_prompt(body, service, must_fit=False)
    else:
        prompt = encode_text(
            body.prompt,
            service,
            "prompt",
            add_special_tokens=body.add_special_tokens,
            must_fit=False,
        )
    response: dict[str, Any] = {
        "count": len(prompt.token_ids),
        "max_model_len": service.max_model_len,
        "tokens": list(prompt.token_ids),
    }
    if body.return_token_strs:
        response["token_strs"] = service.tokenizer.token_names(prompt.token_ids)
    return response


def detokenize(raw: bytes, service: Service) -> dict[str, Any]:
    """Text of token ids, control tokens included. Raises ApiError."""
    body = parse_body(raw, DetokenizeBody)
    check_model(body.model, service)
    check_token_ids(body.tokens, service.vocab_size, "tokens")
    return {"prompt": service.tokenizer.decode(body.tokens)}
