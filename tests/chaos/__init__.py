"""Fault injection for whole runs: `python -m tests.chaos`, or `make chaos`.

Processes of real runs are killed at chosen stages, and the services around them fail. Each run is resumed until it is
finished, and compared bit by bit with a run that nothing happened to.
"""
