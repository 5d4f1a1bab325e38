"""Moves numbered weights from trainers to engines; neither side knows the other."""
