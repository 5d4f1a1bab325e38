"""Frozen, torch-free types of all data that is stored or passed between processes."""
