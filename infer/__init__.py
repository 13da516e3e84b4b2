"""LLM inference as pure functions in JAX, on GPU and CPU."""
