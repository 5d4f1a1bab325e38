"""What a node must have to be used, and how often it may fail before it is left out."""

from pydantic import PositiveFloat, PositiveInt

from roll_core.config.base import Section


class NodesConfig(Section):
    failures: PositiveInt = 2
    """A node with so many infrastructure failures within `window_hours`, of whichever runs, gets no further legs. One may be
    anybody's; a second within a day is seldom chance."""
    window_hours: PositiveFloat = 24.0
    """How long a failure counts against its node."""
    free_gigabytes: PositiveFloat = 1.0
    """Room that a node must have in its temporary folder and in work_dir before roles start."""
    clock_seconds: PositiveFloat = 30.0
    """How far a node's clock may be off that of the leg's driver. S3 refuses requests that are off by 15 minutes, and what
    happened when is told by the clocks of several nodes."""
    canary_seconds: PositiveFloat = 60.0
    """Within which all nodes must have answered what they are asked before roles start. The first import of torch from a
    shared disk is most of it."""
