"""Real engines started, watched, compared and stopped: the demo and the checks."""
