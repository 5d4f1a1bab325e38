"""Backends that compute logprobs and gradients, and move the policy."""
