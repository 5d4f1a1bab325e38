"""Artifacts by digest, manifests by conditional create, on any fsspec filesystem. Torch-free."""
