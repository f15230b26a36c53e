"""Thin adapters: an engine on the one side, the parts of kvtide on the other."""
