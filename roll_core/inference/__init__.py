"""Inference engines: they generate tokens and adopt new weights in between."""
