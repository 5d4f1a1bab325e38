"""What `vllm_engine` and `vllm_worker`, which are in different processes, say to each other beside the names of methods."""

SEED, PLACE = "seed", "place"
"""Keys of a request's extra arguments: what its random numbers depend on, and the place of its first new token. They are not
its `seed` to vLLM, which on CPUs dies of one when a prompt is computed in parts."""
