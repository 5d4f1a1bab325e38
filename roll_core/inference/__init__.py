"""Engines that generate tokens and adopt new weights while they do."""
