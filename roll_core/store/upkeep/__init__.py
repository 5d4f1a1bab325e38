"""Store upkeep: retention of checkpoints and weights versions, and garbage collection of objects."""
