"""Pure functions on tensors, each method once, and the catalogue that composes them into named algorithms."""
