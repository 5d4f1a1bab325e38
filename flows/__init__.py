"""What happens, in order. Prefect flows; no tensors, no clusters. `flows.cli` is the `roll` command."""
