"""Launching legs through submitit. Imported by `tasks/legs.py` alone."""
