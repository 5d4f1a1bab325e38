"""Launching legs through submitit, on this machine or by SLURM. Imported by `tasks/legs.py` alone."""
