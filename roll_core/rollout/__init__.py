"""Rollout: every sample from its draw to its batch (drawn, generated, graded, grouped)."""
