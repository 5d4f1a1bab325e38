"""Simulation: the real rollout scheduler in virtual time, between modelled engines, graders and trainer."""
