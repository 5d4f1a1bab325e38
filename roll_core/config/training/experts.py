"""Config of a mixture-of-experts model: how its routers are trained, and the warning about unevenly used experts."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, NonNegativeFloat, model_validator

from roll_core.config.base import Section, Unit

EXPERTS = "experts/"
"""Prefix of the metrics on how evenly experts are used."""


class ExpertsConfig(Section):
    """Training of a mixture's routers, and a limit on the load of an expert."""

    max_load: Annotated[float, Unit("times the mean load")] = Field(default=8.0, gt=1.0)
    """Largest load of an expert, as a multiple of the mean load of its layer; a higher one is logged as a warning. In
    Qwen3's mixtures, where a token goes to 8 of 128 experts, 16 is an expert that gets every token."""
    freeze_router: bool = False
    """Keep the routers' weights fixed. Experts still learn, and a token's experts change only with its hidden state."""

    balance_loss: NonNegativeFloat = 0.0
    """Coefficient of a loss that is smallest when a layer uses its experts evenly; 0 is none. 0.001 to 0.01 is customary."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of a loss that keeps the routers' logits small; 0 is none. 0.001 is customary."""

    replay: bool = False
    """Route every token to the experts that the engine chose, weighted by the trainer's own router, which still learns. It
    removes a mismatch: rounding decides near-ties of a router differently in engine and trainer. Only with
    `inference.kind: torch`."""

    @property
    def has_losses(self) -> bool:
        """True if a loss is added on the routers."""
        return self.balance_loss > 0 or self.z_loss > 0

    @property
    def moe_only_key(self) -> str | None:
        """First key that is set and needs a model with experts; None if there is none."""
        keys = ("freeze_router", "balance_loss", "z_loss", "replay")
        return next((key for key in keys if getattr(self, key)), None)

    @model_validator(mode="after")
    def _check_frozen_routers_have_no_losses(self):
        for key in ("balance_loss", "z_loss"):
            if self.freeze_router and getattr(self, key):
                raise ValueError(
                    f"{key} ({getattr(self, key):g}) is to move the routers, which freeze_router leaves as they are: leave "
                    "one of them out"
                )
        return self

    def exceeded_limit(self, metrics: Mapping[str, float]) -> str | None:
        """One sentence if an iteration's metrics exceed max_load, else None."""
        load = metrics.get(f"{EXPERTS}max_load")
        if load is None or load <= self.max_load:
            return None
        return (
            f"{EXPERTS}max_load is {load:.4g}, above training.experts.max_load ({self.max_load:g}): one expert of a layer "
            "gets that many times its share of the tokens, and ranks that have others wait for it; check that the learning "
            "rate is not too high for the router"
        )
