"""Launchers that start legs through submitit, on this machine or on SLURM. Only `tasks/` imports this package."""
