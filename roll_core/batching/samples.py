"""Trajectories of an iteration become samples with advantages. Failed trajectories are left out, and were counted."""

from collections.abc import Sequence

import torch

from roll_core.algorithms.inputs import AdvantageFn, AdvantageInputs
from roll_core.types.sample import Sample
from roll_core.types.trajectory import Trajectory


def build_samples(trajectories: Sequence[Trajectory], advantage: AdvantageFn) -> list[Sample]:
    """One sample per graded trajectory, in the order given."""
    graded = [t for t in trajectories if t.score is not None]
    if not graded:
        return []
    lengths = torch.tensor([t.num_completion_tokens for t in graded])
    group_number = {group: number for number, group in enumerate(dict.fromkeys(t.group for t in graded))}
    advantages_N = advantage(
        AdvantageInputs(
            rewards_S=torch.tensor([t.score.value for t in graded if t.score is not None], dtype=torch.float64),
            group_S=torch.tensor([group_number[t.group] for t in graded]),
            sequence_N=torch.arange(len(graded)).repeat_interleave(lengths),
        )
    )
    shares = torch.split(advantages_N.float(), lengths.tolist())
    return [_as_sample(t, share.tolist()) for t, share in zip(graded, shares, strict=True)]


def _as_sample(trajectory: Trajectory, advantages: list[float]) -> Sample:
    # Several turns in one sequence come with the agentic environments; a single turn is prompt + completion.
    (turn,) = trajectory.turns
    untrained = (0.0,) * len(turn.prompt_ids)
    return Sample(
        token_ids=turn.prompt_ids + turn.completion_ids,
        trained=(False,) * len(turn.prompt_ids) + (True,) * len(turn.completion_ids),
        advantages=untrained + tuple(advantages),
        sampler_logprobs=untrained + turn.sampler_logprobs,
    )
