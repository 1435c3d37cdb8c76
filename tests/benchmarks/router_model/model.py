"""The simple model: FIFO prefill at a fixed rate, decoding beside it, exact LRU caches.

A request's hits are counted, and its blocks are in the cache, from the moment of its placement.
No chunks, no shortage of KV, no interference of prefill with decoding: what is left is placement.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass

from tests.benchmarks.router_model.cache import Cache
from tests.benchmarks.router_model.workload import BLOCK_TOKENS, Request

PREFILL_TOKENS_PER_S = 10_000.0
READ_TOKENS_PER_S = 150_000.0
"""From host memory: 20 GB/s of a model with 128 KiB of KV a token."""
STEP_S = 0.025
"""Of a decoding step, times 1 + batch / 64."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The cluster."""

    replicas: int = 8
    kv_tokens: int = 410_000
    """Of each replica's device."""
    host_share: float = 0.0
    """Host memory of each replica, in devices. All replicas are on one node, and read each
    other's."""

    @property
    def device_blocks(self) -> int:
        return self.kv_tokens // BLOCK_TOKENS

    @property
    def host_blocks(self) -> int:
        return int(self.host_share * self.device_blocks)


@dataclass(slots=True)
class Job:
    """A request on its replica."""

    request: Request
    computed_tokens: int
    begin: float
    first_token_at: float
    end: float = 0.0


class Replica:
    """One of the cluster, at a time that `advance` sets."""

    def __init__(self, name: str, setup: Setup, node_host: Counter[int]) -> None:
        self.name = name
        self.cache = Cache(setup.device_blocks, setup.host_blocks, node_host)
        self.now = 0.0
        self.placed = 0
        self._free_at = 0.0
        self._waiting: deque[Job] = deque()
        self._running: list[tuple[float, int, Job]] = []
        self._active = Counter[int]()
        self._last_output_block = 0

    def advance(self, now: float) -> None:
        """Let time pass."""
        while self._waiting and self._waiting[0].first_token_at <= now:
            job = self._waiting.popleft()
            self._finish(job.first_token_at)
            batch = len(self._running) + 1
            step_s = STEP_S * (1 + batch / 64)
            job.end = job.first_token_at + step_s * job.request.output_tokens
            heapq.heappush(self._running, (job.end, id(job), job))
        self._finish(now)
        self.now = now

    def uncached_tokens(self, request: Request) -> int:
        return request.prompt_tokens - sum(cached_tokens(request, *self.cache.hits(request.blocks)))

    def place(self, request: Request) -> tuple[Job, int, int]:
        """The request comes at `now`: its job, the tokens it found on the device and the host."""
        device, host = cached_tokens(request, *self.cache.hits(request.blocks))
        computed = request.prompt_tokens - device - host
        begin = max(self.now, self._free_at)
        took = computed / PREFILL_TOKENS_PER_S + host / READ_TOKENS_PER_S
        job = Job(request, computed, begin, begin + took)
        self._free_at = job.first_token_at
        self._waiting.append(job)
        self._active.update(request.blocks)
        self.cache.use([*request.blocks, *self._output_blocks(request)])
        self.placed += 1
        return job, device, host

    @property
    def queued_tokens(self) -> int:
        """Uncached ones, to be computed before those of a request that comes now."""
        return int(max(0.0, self._free_at - self.now) * PREFILL_TOKENS_PER_S)

    @property
    def waiting(self) -> int:
        """Requests without their first token."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that decode."""
        return len(self._running)

    @property
    def in_flight(self) -> int:
        return self.waiting + self.running

    def active_blocks(self, request: Request | None = None) -> int:
        """Different blocks of all requests in flight, and of `request` as if it were there."""
        more = () if request is None else request.blocks
        return len(self._active) + sum(block not in self._active for block in more)

    def _output_blocks(self, request: Request) -> range:
        """Those that the output takes beyond the prompt's last: nobody else's. Numbered from -1
        down, the prompts' being from 0 up."""
        tokens = request.prompt_tokens + request.output_tokens
        last = self._last_output_block
        self._last_output_block -= -(-tokens // BLOCK_TOKENS) - len(request.blocks)
        return range(last - 1, self._last_output_block - 1, -1)

    def _finish(self, now: float) -> None:
        while self._running and self._running[0][0] <= now:
            _, _, job = heapq.heappop(self._running)
            self._active.subtract(job.request.blocks)
            for block in job.request.blocks:
                if not self._active[block]:
                    del self._active[block]


def cached_tokens(request: Request, device: int, host: int) -> tuple[int, int]:
    """Tokens in the leading blocks. One token is always computed; the last block may be short."""
    most = request.prompt_tokens - 1
    on_device = min(device * BLOCK_TOKENS, most)
    return on_device, min((device + host) * BLOCK_TOKENS, most) - on_device
