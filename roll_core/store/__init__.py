"""Object store of a run, in a folder or an S3 bucket: artifacts by digest, manifests and records by conditional create.

Torch-free, since the control plane uses it. `object_store.py` is the interface, `media/` holds the bytes, `records/` defines
what is stored, `upkeep/` removes what is no longer needed.
"""
