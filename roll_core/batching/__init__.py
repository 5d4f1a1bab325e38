"""Trajectories to samples to balanced, packed micro-batches."""
