"""What a request used, and what serving it took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.journal import Journal


def usage(journals: Sequence[Journal]) -> dict[str, Any]:
    """OpenAI's usage object for all prompts and choices, with our receipt under `quire`.

    A prompt counts once, however many choices it has; so do its cached tokens, which are those
    that its first choice found.
    """
    receipts = [
        [choice.receipt for choice in journal.choices if choice.receipt is not None]
        for journal in journals
    ]
    cached = sum(min((each.cached_tokens for each in one), default=0) for one in receipts)
    every = [receipt for one in receipts for receipt in one]
    return token_counts(journals) | {
        "prompt_tokens_details": {"cached_tokens": cached},
        "quire": {
            "preemptions": sum(each.preemptions for each in every),
            "recomputed_tokens": sum(each.recomputed_tokens for each in every),
            "stall_ms": round(1000 * sum(each.stall_s for each in every), 3),
            "cached_tokens": cached,
        },
    }


def token_counts(journals: Sequence[Journal]) -> dict[str, int]:
    """Prompt, output and total tokens so far."""
    prompt = sum(len(journal.request.prompt_token_ids) for journal in journals)
    output = sum(journal.completion_tokens for journal in journals)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }
