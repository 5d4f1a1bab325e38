"""How the routers of a mixture are trained, and what is said when it uses its experts unevenly."""

from collections.abc import Mapping

from pydantic import Field, NonNegativeFloat, model_validator

from roll_core.config.base import Section

EXPERTS = "experts/"
"""The area of the metrics that say how evenly experts are used."""


class ExpertsConfig(Section):
    max_load: float = Field(default=8.0, gt=1.0)
    """Most tokens that an expert may get, over the mean of its layer, before a warning says so. With as many experts
    as Qwen3 has, 128 of which 8 are chosen, 16 is an expert that gets every token."""
    freeze_router: bool = False
    """Leave the routers as they are: experts learn, and which of them a token goes to changes with what it is alone."""

    balance_loss: NonNegativeFloat = 0.0
    """Coefficient of a loss that is least when a layer's experts are used alike; 0 is none. 0.001 to 0.01 is customary."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of a loss that keeps the logits of routers small; 0 is none. 0.001 is customary."""

    replay: bool = False
    """Send every token to the experts that it went to in the engine, weighted by the trainer's own router, which goes on
    learning. A router that is close to undecided is decided by rounding, differently in engine and trainer."""

    @property
    def has_losses(self) -> bool:
        return self.balance_loss > 0 or self.z_loss > 0

    @property
    def needs_experts(self) -> str | None:
        """A key that is set, and means nothing for a model without experts."""
        keys = ("freeze_router", "balance_loss", "z_loss", "replay")
        return next((key for key in keys if getattr(self, key)), None)

    @model_validator(mode="after")
    def _frozen_routers_learn_nothing(self):
        for key in ("balance_loss", "z_loss"):
            if self.freeze_router and getattr(self, key):
                raise ValueError(
                    f"{key} ({getattr(self, key):g}) is to move the routers, which freeze_router leaves as they are: leave "
                    "one of them out"
                )
        return self

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
