"""Blocks that grow and shrink over an arena, on one account of the ledger."""
