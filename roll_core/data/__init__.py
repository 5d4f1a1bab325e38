"""Problem sources (seeded, resumable, with held-out problems kept apart) and the problem ledger."""
