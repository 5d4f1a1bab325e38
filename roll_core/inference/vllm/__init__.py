"""The vLLM engine: the engine in the role's process, a worker extension in vLLM's processes, and fast weight loading."""
