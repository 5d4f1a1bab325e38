"""Fault injection: runs are killed at chosen stages, resumed, and compared bit by bit with an unbroken run."""
