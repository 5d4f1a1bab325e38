"""Conversion of an iteration's graded trajectories into samples and the inputs of credit assignment. Failed trajectories are
left out here; they were counted before. Shapes as in `roll_core.algorithms.inputs`."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_core.algorithms.credit import CreditInputs
from roll_core.algorithms.inputs import AdvantageInputs
from roll_core.types.routing import RoutedExperts, merge_routing
from roll_core.types.sample import Sample
from roll_core.types.trajectory import GREEDY_ATTEMPT, Ending, Score, Trajectory, Turn


@dataclass(frozen=True)
class GradedBatch:
    """Trainable trajectories of an iteration, one sample each, in the order they came."""

    samples: tuple[Sample, ...]
    groups: tuple[int, ...]
    """Group of each sample."""
    credit: CreditInputs
    weights_version_N: Tensor
    """Oldest weights version behind each trained token. It is the version its turn began with: later tokens may attend to
    that version's KV cache."""
    num_without_baseline: int
    """Number of trajectories left out because the greedy attempt at their problem failed."""


def build_batch(trajectories: Sequence[Trajectory]) -> GradedBatch:
    """Build the batch of all graded trajectories. Greedy attempts become the baseline of their group; a group whose greedy
    attempt failed is left out."""
    greedy = {t.group: (t, t.score) for t in trajectories if t.attempt == GREEDY_ATTEMPT and t.score is not None}
    has_greedy = any(t.attempt == GREEDY_ATTEMPT for t in trajectories)
    sampled = [(t, t.score) for t in trajectories if t.score is not None and t.attempt != GREEDY_ATTEMPT]
    graded = [(t, score) for t, score in sampled if not has_greedy or t.group in greedy]
    chosen = [t for t, _ in graded]
    turns = [turn for t in chosen for turn in t.turns]
    sequence_T = torch.arange(len(chosen)).repeat_interleave(torch.tensor([len(t.turns) for t in chosen], dtype=torch.long))
    turn_N = torch.arange(len(turns)).repeat_interleave(
        torch.tensor([len(t.completion_ids) for t in turns], dtype=torch.long)
    )
    oldest_version_T = torch.tensor([min(turn.weights_versions, default=0) for turn in turns], dtype=torch.long)
    domains = tuple(dict.fromkeys(t.domain for t in chosen))
    outcomes = AdvantageInputs(
        rewards_S=_floats(_outcome(t, score) for t, score in graded),
        group_S=_numbered(t.group for t in chosen),
        sequence_N=sequence_T[turn_N],
        turn_N=turn_N,
        sequence_T=sequence_T,
        turn_rewards_T=_floats(turn.reward for turn in turns),
        state_T=_numbered(state for t in chosen for state in _states(t)),
        truncated_S=torch.tensor([t.ending is Ending.LENGTH for t in chosen], dtype=torch.bool),
        greedy_rewards_S=_floats(_outcome(*greedy[t.group]) for t in chosen) if has_greedy else None,
        sampler_logprobs_N=_floats(p for turn in turns for p in turn.sampler_logprobs),
    )
    credit = CreditInputs(
        outcomes=outcomes,
        correct_S=torch.tensor([score.correct for _, score in graded], dtype=torch.bool),
        domain_S=torch.tensor([domains.index(t.domain) for t in chosen], dtype=torch.long),
        domains=domains,
        greedy_lengths_S=_floats(greedy[t.group][0].num_completion_tokens for t in chosen) if has_greedy else None,
    )
    return GradedBatch(
        samples=tuple(_as_sample(t) for t in chosen),
        groups=tuple(t.group for t in chosen),
        credit=credit,
        weights_version_N=oldest_version_T[turn_N],
        num_without_baseline=len(sampled) - len(graded),
    )


def demonstration_sample(prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> Sample:
    """Sample for supervised steps: every completion token is trained."""
    return Sample(
        token_ids=prompt_ids + completion_ids,
        trained=(False,) * len(prompt_ids) + (True,) * len(completion_ids),
    )


def _floats(numbers: Iterable[float]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.float64)


def _outcome(trajectory: Trajectory, score: Score) -> float:
    """Total reward of a trajectory: its score plus the rewards of its turns."""
    return score.value + sum(turn.reward for turn in trajectory.turns)


def _numbered(things: Iterable[Hashable]) -> Tensor:
    """Number things in order of appearance; equal things get equal numbers."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(thing, len(numbers)) for thing in things], dtype=torch.long)


def _states(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """Tokens that the policy was shown before each turn, since its last one."""
    seen = 0
    states: list[tuple[int, ...]] = []
    for turn in trajectory.turns:
        states.append(turn.prompt_ids[seen:])
        seen = len(turn.prompt_ids) + len(turn.completion_ids)
    return states


def _as_sample(trajectory: Trajectory) -> Sample:
    token_ids: tuple[int, ...] = ()
    trained: tuple[bool, ...] = ()
    experts: RoutedExperts | None = None
    for turn in trajectory.turns:
        observed = _new_tokens(turn, token_ids, trajectory.problem_id)
        token_ids += observed + turn.completion_ids
        trained += (False,) * len(observed) + (True,) * len(turn.completion_ids)
        experts = merge_routing(experts, turn.experts)
    return Sample(token_ids, trained, experts)


def _new_tokens(turn: Turn, so_far: tuple[int, ...], problem_id: str) -> tuple[int, ...]:
    """Prompt tokens of a turn that are new since the turn before."""
    assert turn.prompt_ids[: len(so_far)] == so_far, f"a turn of {problem_id} does not continue the conversation before it"
    return turn.prompt_ids[len(so_far) :]
