"""One engine with many workers: a step of memory changes, and who has confirmed it."""
