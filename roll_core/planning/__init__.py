"""Plan of a run, made before anything is queued: what it will do, what it needs, and whether it can run."""
