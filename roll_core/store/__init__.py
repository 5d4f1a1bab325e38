"""Artifacts by digest, manifests by conditional create, in a folder or an S3 bucket. Torch-free."""
