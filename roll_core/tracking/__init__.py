"""MLflow tracking that never blocks or kills a run: the leg appends to a spool, and a separate process uploads it."""
