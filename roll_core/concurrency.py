"""Concurrent coroutines whose results are used as they finish. Engines and reward workers stream their answers by it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def as_they_finish(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> AsyncIterator[list[Result]]:
    """Run the coroutines concurrently and yield results as they finish. Results that come together are in one list.

    If one raises, or the caller stops, the others are cancelled: nothing runs on that is awaited no more.
    """
    finished: asyncio.Queue[asyncio.Task[Result]] = asyncio.Queue()
    tasks = [asyncio.create_task(one) for one in coroutines]
    for task in tasks:
        task.add_done_callback(finished.put_nowait)
    num_pending = len(tasks)
    try:
        while num_pending:
            together = [await finished.get()]
            while not finished.empty():
                together.append(finished.get_nowait())
            num_pending -= len(together)
            yield [task.result() for task in together]
    finally:
        for task in tasks:
            if not task.cancel() and not task.cancelled():
                task.exception()  # it was looked at: asyncio prints no warning about a second error
