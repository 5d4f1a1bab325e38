"""Builders of graded trajectories for tests, from nested lists: one entry per trajectory, in it one per turn.

Everything is float64. Rewards of random batches are quarters, so that sums of them are exact.
"""

import random
from dataclasses import replace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from roll_core.algorithms.advantages import group_relative
from roll_core.algorithms.credit import CreditInputs, CreditRecipe
from roll_core.algorithms.inputs import AdvantageInputs
from roll_core.config.algorithm.shaping import ShapingConfig

few = settings(max_examples=20, deadline=None)
"""Hypothesis settings for properties of whole batches: twenty examples, and no deadline, as a busy machine is no failure."""


def floats(numbers: list) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def advantage_inputs(
    rewards: list[float],
    groups: list[int] | None = None,
    *,
    turns: list[list[int]] | None = None,
    turn_rewards: list[list[float]] | None = None,
    states: list[list[int]] | None = None,
    truncated: list[bool] | None = None,
    **further: list | None,
) -> AdvantageInputs:
    """Build AdvantageInputs. `turns` holds the number of tokens of each turn of each trajectory. By default each trajectory
    has one turn of one token and is of group 0, turns have no rewards of their own, and no trajectory is truncated.
    `further` are other fields of AdvantageInputs, as lists.

    Example: advantage_inputs([1, 0], turns=[[2, 1], [3]], turn_rewards=[[0.5, 0], [0]], values_N=[0.1] * 6)
    """
    turns = turns or [[1] for _ in rewards]
    turn_rewards = turn_rewards or [[0.0] * len(lengths) for lengths in turns]
    states = states or [[0] * len(lengths) for lengths in turns]
    sequence_T = [number for number, lengths in enumerate(turns) for _ in lengths]
    lengths_T = [length for lengths in turns for length in lengths]
    turn_N = [turn for turn, length in enumerate(lengths_T) for _ in range(length)]
    return AdvantageInputs(
        rewards_S=floats(rewards),
        group_S=torch.tensor(groups or [0] * len(rewards)),
        sequence_N=torch.tensor([sequence_T[turn] for turn in turn_N]),
        turn_N=torch.tensor(turn_N),
        sequence_T=torch.tensor(sequence_T),
        turn_rewards_T=floats([reward for turn in turn_rewards for reward in turn]),
        state_T=torch.tensor([state for turn in states for state in turn]),
        truncated_S=torch.tensor(truncated or [False] * len(rewards)),
        **{name: None if numbers is None else floats(numbers) for name, numbers in further.items()},
    )


def credit_inputs(
    outcomes: AdvantageInputs,
    *,
    correct: list[int] | None = None,
    domain: list[int] | None = None,
    domains: tuple[str, ...] = ("sort",),
    **further: list | None,
) -> CreditInputs:
    """Build CreditInputs. By default all trajectories are correct and of the one domain "sort"."""
    return CreditInputs(
        outcomes=outcomes,
        correct_S=torch.tensor(correct or [1] * outcomes.num_sequences, dtype=torch.bool),
        domain_S=torch.tensor(domain or [0] * outcomes.num_sequences),
        domains=domains,
        **{name: None if numbers is None else floats(numbers) for name, numbers in further.items()},
    )


def credit_recipe(shaping: ShapingConfig | None = None, **changes: Any) -> CreditRecipe:
    """Build a recipe. By default it has the advantage of Dr.GRPO, no shaping, and a limit of 10 tokens."""
    defaults: dict[str, Any] = {
        "advantage": group_relative,
        "shaping": shaping or ShapingConfig(),
        "domains": {},
        "kl_estimators": {},
        "max_new_tokens": 10,
        "whiten_advantages": False,
        "advantage_clip": None,
    }
    return CreditRecipe(**defaults | changes)


def outcome_only(inputs: AdvantageInputs) -> Tensor:
    """Give every token the shaped reward of its trajectory: an advantage for tests of shaping alone."""
    return inputs.rewards_S[inputs.sequence_N]


def token_rewards_only(inputs: AdvantageInputs) -> Tensor:
    """Give every token its own reward: an advantage for tests of token penalties alone."""
    assert inputs.token_rewards_N is not None
    return inputs.token_rewards_N


quarters = st.integers(-20, 20).map(lambda number: number / 4)
fractions = st.integers(0, 8).map(lambda number: number / 8)


def random_batches(
    *, max_turns: int = 3, max_tokens: int = 3, pays_turns: bool = True, pays_tokens: bool = True
) -> st.SearchStrategy[AdvantageInputs]:
    """Strategy of batches of two to six trajectories in up to three groups, with a few turns of a few tokens and values.

    A batch grows from one drawn number: drawing every entry would take ten times as long as the tests themselves.
    """

    def grown(seed: int) -> AdvantageInputs:
        pick = random.Random(seed)
        rewards = [-1.0, -0.5, 0.0, 0.0, 0.25, 1.0, 1.0, 2.5]
        turns = [[pick.randint(1, max_tokens) for _ in range(pick.randint(1, max_turns))] for _ in range(pick.randint(2, 6))]
        num_tokens = sum(map(sum, turns))
        return advantage_inputs(
            pick.choices(rewards, k=len(turns)),
            pick.choices(range(3), k=len(turns)),
            turns=turns,
            turn_rewards=[pick.choices(rewards if pays_turns else [0.0], k=len(lengths)) for lengths in turns],
            states=[pick.choices(range(3), k=len(lengths)) for lengths in turns],
            truncated=pick.choices([True, False], k=len(turns)),
            token_rewards_N=pick.choices(rewards, k=num_tokens) if pays_tokens else None,
            values_N=pick.choices(rewards, k=num_tokens),
            final_values_S=pick.choices(rewards, k=len(turns)),
        )

    return st.integers(0, 2**32).map(grown)


def picked(inputs: AdvantageInputs, order: list[int]) -> tuple[AdvantageInputs, Tensor]:
    """Batch of some trajectories of another batch, in this order, and the index of each of its tokens in the other batch."""
    tokens_N = torch.cat([(inputs.sequence_N == number).nonzero()[:, 0] for number in order])
    turns_T = torch.cat([(inputs.sequence_T == number).nonzero()[:, 0] for number in order])
    lengths_T = inputs.turn_N.bincount()
    lengths = [lengths_T[inputs.sequence_T == number].tolist() for number in order]
    skeleton = advantage_inputs(inputs.rewards_S[order].tolist(), inputs.group_S[order].tolist(), turns=lengths)
    chosen = replace(
        skeleton,
        turn_rewards_T=inputs.turn_rewards_T[turns_T],
        state_T=inputs.state_T[turns_T],
        truncated_S=inputs.truncated_S[order],
        token_rewards_N=None if inputs.token_rewards_N is None else inputs.token_rewards_N[tokens_N],
        values_N=inputs.values_N[tokens_N],
        final_values_S=inputs.final_values_S[order],
    )
    return chosen, tokens_N
