"""What a request used, and what serving it took."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from cluster.journal import Journal
from replicas.protocol import Receipt

_NOTHING = Receipt()


def usage(journals: Sequence[Journal]) -> dict[str, Any]:
    """OpenAI's usage object for all prompts and choices, with our receipt under `quire`.

    A prompt counts once, however many choices it has; so do its cached tokens, which are those
    that its first choice found. OpenAI's `cached_tokens` are all that were not computed; under
    `quire` those found on the device and those from the host tier are apart.
    """
    firsts = [journal.choices[0].receipt or _NOTHING for journal in journals]
    device = sum(receipt.cached_tokens for receipt in firsts)
    host = sum(receipt.host_cached_tokens for receipt in firsts)
    every = [
        choice.receipt
        for journal in journals
        for choice in journal.choices
        if choice.receipt is not None
    ]
    preemptions = sum(receipt.preemptions for receipt in every)
    swaps = sum(receipt.swaps for receipt in every)
    hops = [_most_moved(journal) for journal in journals]
    placements = [json.loads(text) for receipt in hops for text in receipt.placements]
    return token_counts(journals) | {
        "prompt_tokens_details": {"cached_tokens": device + host},
        "quire": {
            "preemptions": preemptions,
            "mode": _mode(preemptions, swaps),
            "recomputed_tokens": sum(receipt.recomputed_tokens for receipt in every),
            "restored_tokens": sum(receipt.restored_tokens for receipt in every),
            "stall_ms": round(1000 * sum(receipt.stall_s for receipt in every), 3),
            "cached_tokens": device,
            "host_cached_tokens": host,
            "failovers": sum(receipt.failovers for receipt in hops),
            "moves": sum(receipt.moves for receipt in hops),
        }
        | ({"placements": placements} if placements else {}),
    }


def _most_moved(journal: Journal) -> Receipt:
    """A choice that ended early knows nothing of its request's later replicas."""
    receipts = [choice.receipt or _NOTHING for choice in journal.choices]
    return max(receipts, key=lambda receipt: receipt.failovers + receipt.moves)


def token_counts(journals: Sequence[Journal]) -> dict[str, int]:
    """Prompt, output and total tokens so far."""
    prompt = sum(len(journal.request.prompt_token_ids) for journal in journals)
    output = sum(journal.completion_tokens for journal in journals)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


def _mode(preemptions: int, swaps: int) -> Literal["none", "recompute", "swap", "mixed"]:
    if preemptions == 0:
        return "none"
    if swaps == 0:
        return "recompute"
    return "swap" if swaps == preemptions else "mixed"
