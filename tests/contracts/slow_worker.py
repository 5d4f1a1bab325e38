"""vLLM's worker as the engine uses it, and slower: a test can interrupt it between two tokens."""

import os
import time
from typing import Any

from roll_core.inference.vllm.worker import WorkerExtension


class SlowWorker(WorkerExtension):
    steps_taken = 0

    def roll_begin(self, role_pid: int) -> bool:
        loads_in_place = super().roll_begin(role_pid)
        execute = self.model_runner.execute_model
        self.pause_s = 0.0

        def slowly(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.steps_taken += scheduled.total_num_scheduled_tokens > 0
            time.sleep(self.pause_s)
            return execute(scheduled, *args, **kwargs)

        self.model_runner.execute_model = slowly
        return loads_in_place

    def slow_down(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def count_steps(self) -> int:
        return self.steps_taken

    def process_id(self) -> int:
        return os.getpid()
