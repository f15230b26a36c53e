"""Elastic KV-cache memory for LLM engines that share a GPU."""

__version__ = "0.1.0"
