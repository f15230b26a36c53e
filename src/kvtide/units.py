"""Sizes for people: the one place where bytes are parsed and written."""

from __future__ import annotations

import re

from kvtide.errors import UsageError

__all__ = ["GIB", "KIB", "MIB", "TIB", "format_gib", "format_size", "parse_size"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_SCALE = {
    "": 1,
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", re.ASCII)
_MAX_BYTES = (1 << 63) - 1


def parse_size(text: str) -> int:
    """Read a size such as `12GiB`, `512MiB`, `1.5 GB` or plain bytes.

    Binary units (KiB, MiB, GiB, TiB) are powers of 1024, decimal ones (kB, MB, GB, TB) powers of
    1000; letters may be of either case. A fraction of a byte is cut off.

    Returns
    -------
    int
        Bytes, from 0 to 2^63 - 1.

    Raises
    ------
    UsageError
        The text is not such a size.
    """
    match = _SIZE.fullmatch(text)
    scale = _SCALE.get(match[2].upper()) if match else None
    if match is None or scale is None:
        raise UsageError(f"{text!r} is not a size; write for example 12GiB, 512MiB or 1048576")
    whole, _, fraction = match[1].partition(".")
    size = int(whole) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)
    if size > _MAX_BYTES:
        raise UsageError(f"{text!r} is more than a size can be (2^63 - 1 bytes)")
    return size


def format_size(size_bytes: int) -> str:
    """Write bytes for a person: exact in the largest unit that divides, else with two decimals."""
    sign, size = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    for name, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale:
            if size % scale == 0:
                return f"{sign}{size // scale}{name}"
            return f"{sign}{size / scale:.2f}{name}"
    return f"{sign}{size}B"


def format_gib(size_bytes: int) -> str:
    """Write bytes as a bare number of GiB for a column under that heading, to three decimals."""
    return f"{size_bytes / GIB:.3f}"
