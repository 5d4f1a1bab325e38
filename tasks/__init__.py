"""Prefect tasks: each sends one request to the roles and returns a receipt. Every task is PURE or STATE_CHANGING, see
`durability.py`. Used by `flows/`."""
