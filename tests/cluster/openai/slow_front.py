"""A front whose backend is slow, on a clock that jumps."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from cluster.openai.service import Backend, Limits
from cluster.tokenizer import Tokenizer
from tests.cluster.openai.fake_backend import FakeBackend, always
from tests.cluster.openai.harness import Front, make_service
from tests.cluster.virtual_clock import run_virtually

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 1500}


class Slow:
    """A front whose backend takes a second a token, and what became of a request there."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        backend: Backend | None = None,
        request_timeout_s: float | None = None,
        receipt_wait_s: float = 1.0,
    ) -> None:
        self.fake = FakeBackend(always([28] * 5000), step_s=1.0)
        self.timeouts = 0
        self.ended_at = 0.0
        limits = Limits(receipt_wait_s=receipt_wait_s, request_timeout_s=request_timeout_s)
        self.service = make_service(
            tokenizer, backend or self.fake, limits=limits, note_timeout=self._count
        )
        self.front = Front(self.service)

    def _count(self) -> None:
        self.timeouts += 1

    def post(self, path: str = COMPLETIONS, **body: Any) -> httpx.Response:
        """The answer, once nothing is left of the request."""

        async def run() -> httpx.Response:
            response = await self.front.send("POST", path, json=body)
            self.ended_at = asyncio.get_running_loop().time()
            steps = self.fake.steps
            await asyncio.sleep(100.0)
            assert self.fake.steps == steps, "it runs on"
            assert len(asyncio.all_tasks()) == 1
            return response

        return run_virtually(run())

    def assert_all_closed(self, prompts: int) -> None:
        assert sorted(self.fake.closed) == sorted(r.request_id for r in self.fake.requests)
        assert len(self.fake.closed) == prompts


def error_of(whose: str, param: str | None) -> dict[str, Any]:
    return {
        "message": f"the request was not complete within {whose} of 4.5 s",
        "type": "timeout_error",
        "param": param,
        "code": "deadline_exceeded",
    }


OWN = error_of("its timeout_s", "timeout_s")
SERVERS = error_of("this server's limit", None)
