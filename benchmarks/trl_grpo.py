"""TRL side of `benchmarks.grpo_vs_trl`, which starts it: GRPOTrainer on the same weights, problems, reward and schedule.

    python -m benchmarks.trl_grpo FOLDER [--micro-batch SEQUENCES]

Reads from FOLDER `config.json` (the run's resolved config) and `model/` (the policy of its iteration 0, with a tokenizer).
Writes there `iterations.jsonl`, one `TrlIteration` per line, and `trained/`, the final policy. TRL gets the settings that
suit it best: no activation checkpointing, no logging, no evaluation, no checkpoints. On a CPU it trains in float32 and
generates with transformers, since vLLM cannot load weights there in the way that TRL sends them. On a GPU it trains in
bfloat16 over float32 weights and generates with vLLM on the same GPU, always awake.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from roll_core.config.inference import VllmInference
from roll_core.config.load import validate_config
from roll_core.config.operations.placement import DeviceKind
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.run import RunConfig
from roll_core.config.training.training import Precision
from roll_core.data.problem_source import build_source
from roll_core.rewards.base import Reward
from roll_core.rewards.build import build_reward
from roll_core.rollout.renderer import build_renderer
from roll_core.training.schedule import learning_rate_at
from roll_core.types.refs import Record
from roll_core.types.trajectory import Ending, Problem, Trajectory, Turn


class TrlIteration(Record):
    """One optimizer step of TRL, with the generation before it.

    Example: TrlIteration(seconds=0.92, generate_seconds=0.41, num_tokens=3071, mean_reward=0.15)
    """

    seconds: float
    """Seconds from the end of the optimizer step before to the end of this one."""
    generate_seconds: float
    num_tokens: int
    mean_reward: float


class Stopwatch(TrainerCallback):
    """Recorder of iterations. Trainer and reward set their numbers; the callback at the end of a step records them."""

    def __init__(self) -> None:
        self.iterations: list[TrlIteration] = []
        self.generate_seconds = 0.0
        self.num_tokens = 0
        self.mean_reward = 0.0
        self._last = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.iterations.append(
            TrlIteration(
                seconds=now - self._last,
                generate_seconds=self.generate_seconds,
                num_tokens=self.num_tokens,
                mean_reward=self.mean_reward,
            )
        )
        self._last = now


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that records the seconds of generation, which is the method `_generate` in TRL 1.16."""

    stopwatch: Stopwatch

    def _generate(self, prompts):
        start = time.perf_counter()
        generated = super()._generate(prompts)
        self.stopwatch.generate_seconds = time.perf_counter() - start
        return generated


class ProblemReward:
    """The run's reward behind TRL's interface: columns of the dataset come as lists beside the completions."""

    __name__ = "reward"

    def __init__(self, reward: Reward, problems: Sequence[Problem], stopwatch: Stopwatch):
        self._reward = reward
        self._problems = problems
        self._stopwatch = stopwatch

    def __call__(
        self, *, completions: list[str], completion_ids: list[list[int]], index: list[int], **_: object
    ) -> list[float]:
        rewards = asyncio.run(self._grade(completions, [self._problems[i] for i in index]))
        self._stopwatch.num_tokens = sum(len(ids) for ids in completion_ids)
        self._stopwatch.mean_reward = sum(rewards) / len(rewards)
        return rewards

    async def _grade(self, completions: list[str], problems: list[Problem]) -> list[float]:
        pairs = zip(problems, completions, strict=True)
        return [(await self._reward(problem, build_trajectory(problem, text))).value for problem, text in pairs]


def build_trajectory(problem: Problem, text: str) -> Trajectory:
    """Build a trajectory of one turn that has only its text: all that a reward reads."""
    turn = Turn(prompt_ids=(), completion_ids=(), sampler_logprobs=(), weights_versions=(), text=text)
    return Trajectory(problem.problem_id, problem.domain, 0, 0, (turn,), Ending.STOP, None, None)


def render_prompts(config: RunConfig, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Render prompts as text; assert that the tokenizer turns it into the run's own token ids."""
    renderer, texts = build_renderer(config.model), []
    for problem in problems:
        chat = [{"role": message.speaker.value, "content": message.text} for message in problem.messages]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert tuple(tokenizer(text)["input_ids"]) == renderer.prompt(problem.messages), f"other tokens for {text!r}"
        texts.append(text)
    return texts


def trl_settings(config: RunConfig, micro_batch: int, folder: Path) -> GRPOConfig:
    """Translate the run's algorithm, rollout and training settings into TRL's."""
    algorithm, rollout = config.algorithm, config.rollout
    on_cpu = config.cluster.device is DeviceKind.CPU
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=config.iterations,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rollout.num_trajectories // micro_batch,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        beta=0.0,
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        loss_type="dapo",
        scale_rewards="group" if algorithm.scale_by_std else "none",
        max_grad_norm=config.training.optimizer.max_gradient_norm,
        shuffle_dataset=False,
        seed=config.seed,
        use_cpu=on_cpu,
        bf16=config.training.precision is Precision.BFLOAT16,
        use_vllm=not on_cpu,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=config.inference.memory_share if isinstance(config.inference, VllmInference) else 0.3,
        vllm_max_model_length=config.model.max_positions,
        vllm_importance_sampling_correction=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def optimizer_and_schedule(
    model: PreTrainedModel, config: OptimizerConfig, total_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Build the optimizer of the `torch` backend and its learning rate schedule."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_at(step, config, total_steps) / config.learning_rate
    )
    return optimizer, schedule


def train(config: RunConfig, micro_batch: int, folder: Path) -> list[TrlIteration]:
    """Run all updates, save the trained policy in the folder, and return the iterations."""
    source = build_source(config.problems, config.seed)
    problems = [source.problem(index) for index in range(config.iterations * config.rollout.num_groups)]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    prompts = render_prompts(config, problems, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa")
    stopwatch = Stopwatch()
    trainer = TimedTrainer(
        model=model,
        reward_funcs=ProblemReward(build_reward(config.reward), problems, stopwatch),
        args=trl_settings(config, micro_batch, folder),
        train_dataset=Dataset.from_dict({"prompt": prompts, "index": list(range(len(prompts)))}),
        processing_class=tokenizer,
        callbacks=[stopwatch],
        optimizers=optimizer_and_schedule(model, config.training.optimizer, config.total_optimizer_steps),
    )
    trainer.stopwatch = stopwatch
    trainer.train()
    model.save_pretrained(folder / "trained")
    return stopwatch.iterations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--micro-batch", type=int, help="sequences per forward-backward pass; default: all of an iteration")
    options = parser.parse_args()
    folder: Path = options.folder
    config = validate_config(json.loads((folder / "config.json").read_text()), "config.json")
    torch.set_num_threads(config.cluster.threads_per_device)
    iterations = train(config, options.micro_batch or config.rollout.num_trajectories, folder)
    (folder / "iterations.jsonl").write_text("".join(iteration.model_dump_json() + "\n" for iteration in iterations))


if __name__ == "__main__":
    main()
