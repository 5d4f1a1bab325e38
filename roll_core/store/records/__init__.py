"""Stored records: runs, manifests, checkpoints, exports, weights, rollouts, traces, node failures, each with its codec."""
