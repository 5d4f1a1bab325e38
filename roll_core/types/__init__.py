"""Torch-free frozen records: what crosses a process, a disk or a wire."""
