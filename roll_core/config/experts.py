"""How the routers of a mixture are trained, and what is said when it uses its experts unevenly."""

from collections.abc import Mapping

from pydantic import Field

from roll_core.config.base import Section

EXPERTS = "experts/"
"""The area of the metrics that say how evenly experts are used."""


class ExpertsConfig(Section):
    max_load: float = Field(default=8.0, gt=1.0)
    """Most tokens that an expert may get, over the mean of its layer, before a warning says so. With as many experts
    as Qwen3 has, 128 of which 8 are chosen, 16 is an expert that gets every token."""
    freeze_router: bool = False
    """Leave the routers as they are: experts learn, and which of them a token goes to changes with what it is alone."""

    @property
    def needs_experts(self) -> str | None:
        """A key that is set, and means nothing for a model without experts."""
        return "freeze_router" if self.freeze_router else None

    def complaint(self, metrics: Mapping[str, float]) -> str | None:
        """One sentence, if an iteration's metrics are beyond the limit."""
        load = metrics.get(f"{EXPERTS}max_load")
        if load is None or load <= self.max_load:
            return None
        return (
            f"{EXPERTS}max_load is {load:.4g}, above training.experts.max_load ({self.max_load:g}): one expert of a layer "
            "gets that many times its share of the tokens, and ranks that have others wait for it; check that the learning "
            "rate is not too high for the router"
        )
