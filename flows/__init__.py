"""Prefect flows: the order in which tasks run. They know no tensors and no clusters. `flows.cli` is the `roll` command."""
