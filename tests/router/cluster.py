"""A Placer among replicas that are played by hand."""

from __future__ import annotations

from replicas.core.block_hash import BlockHasher
from replicas.core.sampling_params import SamplingParams
from replicas.protocol import BlockEvents, GenerateRequest
from router.placement import POLICIES, Placement, Placer
from tests.router.feeds import BLOCK_SIZE, Feed

REPLICAS = ["r0", "r1", "r2"]
PREFIX = list(range(400))
HASHER = BlockHasher(fingerprint="model", kv_dtype="float32", block_size=BLOCK_SIZE)


def request(tokens: list[int], *, max_tokens: int = 40, salt: str = "") -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return GenerateRequest(f"id {tokens[-1]}", tuple(tokens), sampling, cache_salt=salt)


class Cluster:
    """A Placer and replicas that report nothing unless they are told to."""

    def __init__(self, policy: str = "prefix_aware", *, connect: bool = True) -> None:
        self.placer = Placer(POLICIES[policy]())
        self.replicas = list(REPLICAS)
        self.now = 0.0
        self.feeds = {name: Feed(self.placer.states, name) for name in REPLICAS}
        if connect:
            for feed in self.feeds.values():
                feed.connect(0.0)

    def placement(self, call: str, tokens: list[int], **extra: object) -> Placement:
        asked = request(tokens, **extra)  # type: ignore[arg-type]
        return self.placer.place(call, asked, self.replicas, self.now)

    def place(self, call: str, tokens: list[int], **extra: object) -> str:
        return self.placement(call, tokens, **extra).ranked[0]

    def serve(self, call: str, tokens: list[int], **extra: object) -> str:
        """Placed, computed and over at once: the blocks stay."""
        chosen = self.place(call, tokens, **extra)
        salt = str(extra.get("salt", ""))
        stored = tuple(HASHER.chain(tokens, salt))
        self.placer.routed(call, chosen, self.now)
        self.feeds[chosen].step(self.now, BlockEvents(stored=stored))
        self.placer.completed(call)
        return chosen

    def report(self, replica: str, **load: float) -> None:
        assert self.feeds[replica].step(self.now, **load)
