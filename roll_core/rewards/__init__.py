"""Rewards grade trajectories. A reward that fails raises; it never returns zero instead."""
