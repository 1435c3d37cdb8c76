"""Requests, a KV manager and a policy, as many tests want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from replicas.core.block_events import BlockEventLog
from replicas.core.block_hash import BlockHasher
from replicas.core.block_pool import BlockPool
from replicas.core.cost_model import CostModel
from replicas.core.host_tier import HostTier
from replicas.core.kv_manager import KVManager
from replicas.core.offloader import Offloader
from replicas.core.preemption.policy import Candidate
from replicas.core.sampling_params import SamplingParams
from replicas.protocol import GenerateRequest


class BestRanked:
    """The worst of policies: it throws away what has been worked on longest."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda candidate: candidate.choice.rank)


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    n: int = 1,
    priority: int = 0,
    salt: str = "",
    sampling: SamplingParams | None = None,
) -> GenerateRequest:
    """A request that runs to `max_tokens`, unless `sampling` says otherwise."""
    base = sampling or SamplingParams(max_tokens=max_tokens, seed=17, ignore_eos=True)
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=base,
        n=n,
        priority=priority,
        cache_salt=salt,
    )


def with_prompt_logprobs(data: GenerateRequest) -> GenerateRequest:
    return replace(data, sampling=replace(data.sampling, prompt_logprobs=0))


def make_hasher(block_size: int) -> BlockHasher:
    return BlockHasher(fingerprint="model", kv_dtype="float32", block_size=block_size)


def make_kv(
    num_blocks: int,
    block_size: int,
    *,
    caching: bool = True,
    host_slots: int = 0,
    spill_tokens: int | None = None,
    events: BlockEventLog | None = None,
    costs: CostModel | None = None,
) -> KVManager:
    pool = BlockPool(num_blocks, events)
    tier = HostTier(host_slots, events if caching else None)
    return KVManager(
        pool,
        make_hasher(block_size),
        costs=costs or CostModel(block_bytes=block_size),
        caching=caching,
        offloader=Offloader(pool, tier) if host_slots else None,
        spill_tokens=spill_tokens,
    )
