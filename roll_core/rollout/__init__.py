"""The life of every sample: drawn, generated, graded, grouped."""
