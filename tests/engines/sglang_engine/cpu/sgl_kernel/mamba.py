"""The same, for names below `mamba`."""

from . import __getattr__  # noqa: F401
