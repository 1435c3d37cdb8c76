"""Chat messages -> prompt."""

from __future__ import annotations

from cluster.openai.errors import bad_request
from cluster.openai.messages import plain_messages
from cluster.openai.prompts import Prompt, encode_text
from cluster.openai.schema import ChatBody, TokenizeBody
from cluster.openai.service import Service
from cluster.tokenizer import ChatTemplateError


def chat_prompt(body: ChatBody | TokenizeBody, service: Service, *, must_fit: bool) -> Prompt:
    """The prompt that the model's chat template makes of the messages. Raises ApiError 400,
    with `must_fit` also for one that clearly does not fit into the context."""
    messages = body.messages or []
    if len(messages) > service.max_model_len:
        # Each costs a token at the least, so that rendering them would be for nothing.
        raise bad_request(
            f"messages has {len(messages)} messages; the context of {service.max_model_len} "
            "tokens cannot hold them",
            "messages",
            "context_length_exceeded",
        )
    plain = plain_messages(messages, service.tokenizer.chat_template or "")
    try:
        text = service.tokenizer.render_chat(
            plain,
            add_generation_prompt=_opens_answer(body),
            continue_final_message=body.continue_final_message,
        )
    except ChatTemplateError as error:
        raise bad_request(f"messages cannot be rendered: {error}", "messages") from error
    prompt = encode_text(text, service, "messages", add_special_tokens=False, must_fit=must_fit)
    return Prompt(prompt.token_ids)


def _opens_answer(body: ChatBody | TokenizeBody) -> bool:
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    if body.add_generation_prompt and body.continue_final_message:
        raise bad_request(
            "add_generation_prompt and continue_final_message exclude each other",
            "add_generation_prompt",
        )
    return body.add_generation_prompt
