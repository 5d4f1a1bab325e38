"""Config of operations: legs, cluster and placement, store, tracking, weight transport, nightly runs."""
