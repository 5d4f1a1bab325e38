"""Rewards grade trajectories. A reward that fails raises; it never answers zero."""
