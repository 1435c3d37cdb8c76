"""A second ingress that joins a running cluster: prints how long it was blind, as JSON.

Usage: late_ingress.py RAY_ADDRESS PROMPT
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import aclosing

import ray
from ray import serve

from cluster.failover import FailoverBackend
from cluster.follower import FollowLimits
from cluster.replica_backend import ReplicaBackend
from cluster.reply_listener import ReplyListener
from cluster.tokenizer import Tokenizer
from replicas.core.sampling_params import SamplingParams
from replicas.models.sources import resolve
from replicas.protocol import GenerateRequest

PATIENCE_S = 60.0


async def main(prompt: str) -> None:
    tokenizer = Tokenizer.load(resolve("embedded"))
    token_ids = tuple(tokenizer.encode(prompt, add_special_tokens=True))
    listener = ReplyListener("127.0.0.1")
    await listener.start()
    limits = FollowLimits(max_failovers=1, patience_s=60.0, max_moves=0, move_gain=2.0)
    begin = time.monotonic()
    handle = serve.get_deployment_handle("Replica", "quire")
    backend = FailoverBackend(ReplicaBackend(handle, listener), limits, 8)
    for number in range(10_000):
        request = GenerateRequest(
            f"late-{number}", token_ids, SamplingParams(max_tokens=1, seed=1), explain=True
        )
        placed_at = time.monotonic()
        async with aclosing(backend.generate(request)) as stream:
            deltas = [delta async for step in stream for delta in step]
        receipt = deltas[-1].receipt
        assert receipt is not None
        placement = json.loads(receipt.placements[0])
        hit = max((terms["device_tokens"] for terms in placement["terms"]), default=0)
        if not placement["stale"] and hit > 0:
            blind_s = placed_at - begin
            print(json.dumps({"blind_s": blind_s, "hit": hit, "chosen": placement["chosen"]}))
            return
        assert time.monotonic() - begin < PATIENCE_S, placement


if __name__ == "__main__":
    ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False)
    asyncio.run(main(sys.argv[2]))
