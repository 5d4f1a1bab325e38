"""Simulation: the real rollout scheduler in virtual time, with modelled engines, graders and trainer."""
