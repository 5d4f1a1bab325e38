"""Store upkeep: checkpoint retention and garbage collection."""
