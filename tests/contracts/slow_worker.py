"""Worker extension of vLLM that can be slowed down, so that a test can interrupt generation between two tokens."""

import os
import time
from typing import Any

from roll_core.inference.vllm.worker import WorkerExtension


class SlowWorker(WorkerExtension):
    """Worker of the engine that counts its steps and pauses before each."""

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
        """Pause for so many seconds before every step from now on."""
        self.pause_s = pause_s

    def count_steps(self) -> int:
        """Number of steps so far that computed any token."""
        return self.steps_taken

    def process_id(self) -> int:
        return os.getpid()
