"""What a worker found itself to hold when its start ended: told by it, read by `kvtide census`.

It lies in an anonymous file of the worker's own: it is there as long as the worker is, also when
that was killed, and nothing is left to be removed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

__all__ = ["Allocated", "OwnFigures", "Split", "by_kind", "publish_figures", "read_figures"]

_NAME: Final = "kvtide-census"
_LINK: Final = f"/memfd:{_NAME} (deleted)"


class Allocated(msgspec.Struct, frozen=True):
    """One thing that was allocated for KV or state; as `sizing.rows.Allocation`."""

    name: str
    kind: str
    layers: tuple[str, ...]
    count: int
    bytes: int


class OwnFigures(msgspec.Struct, frozen=True):
    """One rank of an engine at the end of its start.

    Attributes
    ----------
    config_file
        The model's `config.json` on this machine; None where it has none.
    request
        What decides the plan, as the fields of `sizing.request.Request`.
    budget_bytes
        What KV and state may take; None where a number of blocks was given instead.
    draft_file
        The draft model's `config.json`.
    bytes_by_kind
        Beside KV and state: weights, graphs, activations, context, other, as far as known.
    planned_bytes
        The same as the capacity was computed with.
    source
        Who said so.
    """

    engine: str
    version: str
    config_file: str | None
    draft_file: str | None
    dtype: str
    rank: int
    request: dict[str, int | str | bool | None]
    budget_bytes: int | None
    allocated: tuple[Allocated, ...]
    bytes_by_kind: dict[str, int]
    planned_bytes: dict[str, int]
    source: str


class Split(NamedTuple):
    """Bytes by kind, and who said so."""

    bytes_by_kind: dict[str, int]
    source: str


def by_kind(
    *,
    reserved_bytes: int,
    weights_bytes: int,
    graphs_bytes: int,
    peak_bytes: int,
    process_bytes: int | None,
    mapped_bytes: int,
    context_bytes: int,
) -> Split:
    """Split what a process holds of a GPU beside its KV cache.

    Parameters
    ----------
    reserved_bytes
        What torch's allocator has of the device: weights, graphs and activations are in it.
    peak_bytes
        Torch's peak above the weights in the profile run; 0 where there was none.
    process_bytes
        The driver's figure of the whole process; None where it tells none.
    mapped_bytes
        What is mapped of the KV cache, which is in the driver's figure and not in torch's.
    context_bytes
        What a process holds beside both where the driver tells nothing.
    """
    left_bytes = max(0, reserved_bytes - weights_bytes - graphs_bytes)
    activations_bytes = min(peak_bytes, left_bytes)
    source = "torch and the driver"
    if process_bytes is None:
        source = "torch; the context as measured elsewhere, since the driver does not tell"
    else:
        context_bytes = max(0, process_bytes - reserved_bytes - mapped_bytes)
    found = {
        "weights": weights_bytes,
        "graphs": graphs_bytes,
        "activations": activations_bytes,
        "context": context_bytes,
        "other": left_bytes - activations_bytes,
    }
    return Split(found, source)


def publish_figures(figures: OwnFigures) -> int:
    """Tell them, until this process ends or the descriptor that is returned is closed."""
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    os.write(descriptor, msgspec.json.encode(figures))
    return descriptor


def read_figures(pid: int) -> OwnFigures | None:
    """What a process told last; None where it told nothing, has ended, or is another user's."""
    told = []
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if link.is_symlink() and str(link.readlink()) == _LINK:
                told.append(link)
        if not told:
            return None
        last = max(told, key=lambda link: int(link.name))
        return msgspec.json.decode(last.read_bytes(), type=OwnFigures)
    except OSError:
        return None
