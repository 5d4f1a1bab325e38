"""Stored records and their codecs: runs, manifests, checkpoints, exports, weights, rollouts, traces, node failures."""
