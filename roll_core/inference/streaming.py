"""Completions one by one, given out as they come."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

from roll_core.inference.requests import Completion


async def as_they_finish(generating: Iterable[Coroutine[Any, Any, Completion]]) -> AsyncIterator[list[Completion]]:
    """Those that finished together in one list."""
    finished: asyncio.Queue[asyncio.Task[Completion]] = asyncio.Queue()
    tasks = [asyncio.create_task(one) for one in generating]
    for task in tasks:
        task.add_done_callback(finished.put_nowait)
    left = len(tasks)
    while left:
        together = [await finished.get()]
        while not finished.empty():
            together.append(finished.get_nowait())
        left -= len(together)
        yield [task.result() for task in together]
