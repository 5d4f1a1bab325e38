"""The vLLM engine: engine in the role's process, worker extension inside vLLM's process, fast weight loading."""
