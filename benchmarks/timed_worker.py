"""vLLM's worker as the engine uses it, which also says what it spent on new weights."""

import time
from itertools import pairwise

import torch

from roll_core.inference.vllm.worker import WorkerExtension
from roll_core.weights.buckets import open_handle


class TimedWorker(WorkerExtension):
    _seconds: dict[str, float]

    def roll_load_shared(self, handle: bytes, layout: bytes) -> None:
        times = [time.perf_counter()]
        flat = open_handle(handle)
        times.append(time.perf_counter())
        self._roll_load(flat, layout)
        times.append(time.perf_counter())
        torch.cuda.synchronize(self.device)
        times.append(time.perf_counter())
        self._seconds = {
            name: later - earlier for name, (earlier, later) in zip(("open", "find", "copy"), pairwise(times), strict=True)
        }

    def roll_finish_weights(self, pickled_samples: bytes) -> list[str]:
        start = time.perf_counter()
        differences = super().roll_finish_weights(pickled_samples)
        self._seconds["proof"] = time.perf_counter() - start
        return differences

    def seconds_spent(self) -> dict[str, float]:
        """On the last update: opening the handle, finding what goes where and asking for the copies, waiting for them, and
        reading weights back."""
        return self._seconds
