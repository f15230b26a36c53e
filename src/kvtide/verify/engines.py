"""The engines that can be checked, by name."""

from __future__ import annotations

from kvtide.errors import UsageError
from kvtide.verify.servers import Server
from kvtide.verify.sglang_servers import SGLangServer

__all__ = ["ENGINES", "find_engine"]

ENGINES: dict[str, type[Server]] = {kind.engine: kind for kind in (Server, SGLangServer)}


def find_engine(name: str, backend: str) -> type[Server]:
    """An engine's server class.

    Raises
    ------
    UsageError
        There is no such engine, or it is not checked on this backend.
    """
    if name not in ENGINES:
        raise UsageError(f"engine {name!r} cannot be checked; there are {', '.join(ENGINES)}")
    kind = ENGINES[name]
    if backend not in kind.backends:
        raise UsageError(f"{name} is checked on {' and '.join(kind.backends)} alone so far")
    return kind
