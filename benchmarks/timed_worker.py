"""Worker extension of vLLM that also times the steps of a weights update. `benchmarks.gpu_parts` uses it."""

import time
from itertools import pairwise

import torch

from roll_core.inference.vllm.worker import WorkerExtension
from roll_core.weights.buckets import open_handle


class TimedWorker(WorkerExtension):
    """Worker of the engine with a stopwatch around loading and checking weights."""

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
        self._seconds["check"] = time.perf_counter() - start
        return differences

    def seconds_spent(self) -> dict[str, float]:
        """Seconds of the last update: `open` the memory handle, `find` targets and launch copies, wait for the `copy`, and
        read weights back for the `check`."""
        return self._seconds
