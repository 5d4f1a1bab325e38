"""The name by which what a run does is announced, and by which a terminal listens."""

PROGRESS = "roll.progress"
"""Logger whose records carry `run` or `manifest`."""
