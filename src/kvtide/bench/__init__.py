"""Measurements that anyone can repeat: each against its floor, in one run."""
