"""vLLM under kvtide."""
