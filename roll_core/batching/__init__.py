"""Batching: trajectories become samples, and samples packed micro-batches that are balanced over ranks."""
