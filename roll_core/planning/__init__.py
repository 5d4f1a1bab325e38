"""What a run will do and whether it can, before anything is queued."""
