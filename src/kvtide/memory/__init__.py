"""Arenas of reserved addresses and the extents of physical memory mapped into them."""
