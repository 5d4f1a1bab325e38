"""Cost of advantages and loss as a share of an update, and the number of logits tensors that an update allocates.

    python -m benchmarks.loss_cost [--only grpo,ppo] [--repeats 20]

Needs a CPU only. Times every algorithm of the catalogue on 512 random trajectories and the model of the quickstart: credit
assignment, the loss with its gradient with respect to logprobs (without the model), and the whole update. Prints the fastest
of the repeats, which other processes disturbed least. Then counts the [tokens, vocabulary] tensors that one forward and one
backward pass allocate.
"""

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.roll_runs import QUICKSTART, machine_load
from roll_core.algorithms.catalog import TABLE, build_algorithm
from roll_core.algorithms.credit import CreditState, assign_credit
from roll_core.batching.micro_batch import MicroBatch
from roll_core.batching.samples import build_batch
from roll_core.config.load import load_config
from roll_core.config.run import RunConfig
from roll_core.config.training.training import Precision
from roll_core.models.characters import VOCABULARY
from roll_core.training.base import Policy
from roll_core.training.learner import Learner
from roll_core.training.loss_inputs import loss_inputs
from roll_core.training.scorer import Scored
from roll_core.training.torch.backend import TorchBackend
from roll_core.training.torch.trainable import TorchSettings
from roll_core.types.trajectory import GREEDY_ATTEMPT, Ending, Score, Trajectory, Turn

LEFT_OUT = {"distillation": "its teacher is another run"}
"""Algorithms that are not measured, and why."""


def random_trajectories(config: RunConfig) -> list[Trajectory]:
    """Trajectories of one iteration of the config, with random tokens and scores."""
    rng = random.Random(0)
    attempts = [*range(config.rollout.group_size), *([GREEDY_ATTEMPT] if config.algorithm.samples_greedily else [])]
    return [_random_trajectory(rng, group, attempt) for group in range(config.rollout.num_groups) for attempt in attempts]


def _random_trajectory(rng: random.Random, group: int, attempt: int) -> Trajectory:
    length = rng.randint(5, 8)
    prompt = tuple(random.Random(group).randrange(2, 60) for _ in range(6))
    completion = tuple(rng.randrange(2, 60) for _ in range(length))
    turn = Turn(prompt, completion, tuple(-4 + rng.random() for _ in range(length)), (0,) * length, "")
    score = Score(rng.random(), rng.random() < 0.5)
    return Trajectory(f"sort/{group}", "sort", group, attempt, (turn,), Ending.STOP, score, None)


def fastest(act: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of several calls, after one call to warm up."""
    act()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(config: RunConfig, repeats: int) -> tuple[float, float, float]:
    """Seconds of credit assignment, of all losses of an iteration, and of its whole update."""
    learner = Learner(config, rank=0, device=torch.device("cpu"))
    trajectories = random_trajectories(config)
    prepared, inputs = learner.prepare(trajectories, weights_version=0), build_batch(trajectories).credit
    if config.algorithm.has_critic:
        inputs = learner._with_signals(build_batch(trajectories))
    algorithm = build_algorithm(config.algorithm, num_optimizer_steps=1, max_new_tokens=config.rollout.max_new_tokens)
    micro_batches = [micro_batch for step in prepared.steps for micro_batch in step]

    def losses() -> None:
        for micro_batch in micro_batches:
            logprobs_N = micro_batch.tokens.sampler_logprobs_N.clone().requires_grad_()
            scored = Scored(logprobs_N, torch.ones_like(logprobs_N), None)
            algorithm.loss(loss_inputs(micro_batch, scored)).loss.backward()

    def update() -> None:
        learner.update(prepared, 10**9)
        if config.algorithm.has_critic:
            learner.update_critic(prepared, 10**9)

    credit = fastest(lambda: assign_credit(inputs, algorithm.credit, CreditState()), repeats)
    return credit, fastest(losses, repeats), fastest(update, repeats)


class LogitsCounter(TorchDispatchMode):
    """Counter of newly allocated tensors of the vocabulary's width.

    `whole` counts those with all tokens of a micro-batch; `largest` is the number of tokens of the largest.
    """

    def __init__(self, num_tokens: int):
        super().__init__()
        self._num_tokens = num_tokens
        self.whole = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        writes_into_another = func.__name__.split(".")[0].endswith("_") or "out" in (kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else [out]:
            is_wide = isinstance(tensor, torch.Tensor) and tensor.ndim == 2 and tensor.shape[-1] == len(VOCABULARY)
            if is_wide and tensor._base is None and not writes_into_another and tensor.is_floating_point():
                self.whole += tensor.shape[0] >= self._num_tokens
                self.largest = max(self.largest, tensor.shape[0])
        return out


def count_logits(config: RunConfig, micro_batch: MicroBatch, *, entropy: bool, full_kl: bool) -> str:
    """Count [tokens, vocabulary] tensors of one forward and one backward pass over a micro-batch; return a sentence."""
    settings = TorchSettings(config.training, config.seed, 1.0, torch.device("cpu"))
    backend = TorchBackend(config.model, settings)
    backend.build_frozen(Policy.REFERENCE, config.model)
    num_tokens = len(micro_batch.token_index_N)
    with LogitsCounter(num_tokens) as count, settings.autocast():
        scored = backend._scorer(micro_batch, backend._reference_states(micro_batch) if full_kl else None)
        loss = scored.logprobs_N.sum()
        if entropy:
            loss = loss + scored.entropies_N.sum()
        if full_kl:
            loss = loss + scored.divergences_N.sum()
    with count:
        loss.backward()
    return f"{count.whole} with all tokens, the largest has {count.largest} of {num_tokens}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="algorithms to time, separated by commas; default: all")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(2)
    print(machine_load())
    print(f"{'algorithm':20} credit ms  loss ms  update ms  share of the update")
    for row in TABLE:
        if row.kind in LEFT_OUT or (options.only and row.kind not in options.only.split(",")):
            continue
        config = load_config(QUICKSTART, [f"algorithm.kind={row.kind}"])
        credit, loss, update = measure(config, options.repeats)
        share = (credit + loss) / update
        print(f"{row.kind:20} {credit * 1e3:9.2f} {loss * 1e3:8.2f} {update * 1e3:10.1f}  {share:.2%}", flush=True)
    print("[tokens, vocabulary] tensors allocated by forward and backward pass of a micro-batch:")
    for precision in Precision:
        config = load_config(QUICKSTART, [f"training.precision={precision}"])
        learner = Learner(config, rank=0, device=torch.device("cpu"))
        micro_batch = learner.prepare(random_trajectories(config), weights_version=0).steps[0][0]
        for entropy, full_kl in ((False, False), (True, False), (True, True)):
            name = f"{precision}{', entropy bonus' if entropy else ''}{', full KL' if full_kl else ''}"
            print(f"  {name:35} {count_logits(config, micro_batch, entropy=entropy, full_kl=full_kl)}")


if __name__ == "__main__":
    main()
