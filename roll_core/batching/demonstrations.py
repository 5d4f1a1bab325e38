"""Demonstrations as samples, for the warm start."""

from roll_core.types.sample import Sample


def as_sample(prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> Sample:
    """A sample whose completion is to be imitated."""
    return Sample(
        token_ids=prompt_ids + completion_ids,
        trained=(False,) * len(prompt_ids) + (True,) * len(completion_ids),
    )
