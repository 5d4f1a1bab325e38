"""MLflow tracking that can neither block nor kill a run: training appends to a spool, another process uploads it."""
