"""asyncio event loop in virtual time: when all tasks sleep, the clock jumps to the next timer. A deadlock is an error.

Only the time of the loop is virtual; other clocks, like `time.time()`, stay real.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _InstantSelector(selectors.SelectSelector):
    """Selector that adds the timeout to the virtual clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        """Virtual time in seconds."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits for somebody else"
        self.now += timeout
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock is virtual and starts at 0."""

    def __init__(self) -> None:
        self._clock = _InstantSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_in_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a new virtual-time loop, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
