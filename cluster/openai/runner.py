"""Runs the prompts of one request on the backend and hands on what clients may see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from cluster.journal import Journal, Update
from cluster.openai.service import BackendError, DeltaStream, Service
from replicas.protocol import FinishReason, TokenDelta

Indexed = tuple[int, Update]
"""A choice's index in the whole response, and what is new of it."""


def run(
    service: Service, journals: Sequence[Journal], *, receipts: bool
) -> AsyncGenerator[list[Indexed], None]:
    """Updates of all choices, those that came together in one list.

    With `receipts` the end waits for those of choices that a stop string ended, too. Raises
    BackendError where a choice fails; closing the generator aborts whatever runs.
    """
    if len(journals) == 1:
        return _follow(service, journals[0], 0, receipts)
    return _merge(service, journals, receipts)


async def _follow(
    service: Service, journal: Journal, first: int, receipts: bool
) -> AsyncGenerator[list[Indexed], None]:
    async with aclosing(service.backend.generate(journal.request)) as stream:
        while not (journal.settled if receipts else journal.finished):
            timeout_s = service.limits.receipt_wait_s if journal.finished else None
            deltas = await _next(stream, timeout_s)
            if deltas is None:
                break
            yield [
                (first + update.choice, update)
                for delta in deltas
                for update in _take(service, journal, delta)
            ]
    if not journal.finished:
        raise BackendError("the replica ended the request before it was complete")


async def _next(stream: DeltaStream, timeout_s: float | None) -> Sequence[TokenDelta] | None:
    """None at the end of the stream, or when nothing came in time."""
    if timeout_s is None:
        return await anext(stream, None)
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(stream, None)
    except TimeoutError:
        return None


def _take(service: Service, journal: Journal, delta: TokenDelta) -> list[Update]:
    unexpected = delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
    if unexpected and journal.choices[delta.choice].finish_reason is None:
        raise BackendError(delta.error or "the replica aborted the request")
    updates = journal.feed(delta)
    for update in updates:
        if update.abort:
            service.backend.abort(journal.request.request_id, update.choice)
    return updates


async def _merge(
    service: Service, journals: Sequence[Journal], receipts: bool
) -> AsyncGenerator[list[Indexed], None]:
    """Runs all prompts side by side; what has gathered while the client was slow goes out as
    one batch."""
    queue: asyncio.Queue[list[Indexed] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(journal: Journal, first: int) -> None:
        async with aclosing(_follow(service, journal, first, receipts)) as updates:
            async for batch in updates:
                queue.put_nowait(batch)

    n = journals[0].request.n
    tasks = [asyncio.create_task(pump(each, i * n)) for i, each in enumerate(journals)]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    running = len(tasks)
    try:
        while running:
            batch: list[Indexed] = []
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            for item in items:
                if isinstance(item, asyncio.Task):
                    item.result()
                    running -= 1
                else:
                    batch += item
            yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
