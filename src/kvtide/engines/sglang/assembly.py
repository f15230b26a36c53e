"""From SGLang's scheduler to its pools: which memory, allocator and tree go together."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvtide.engines.sglang.cached import cached_by
from kvtide.engines.sglang.memory import Slots
from kvtide.engines.sglang.parts import Part, part_of
from kvtide.errors import UnsupportedError

__all__ = ["Rank", "parts_of", "slots_of"]


class Rank(NamedTuple):
    """What a rank tells the others: its device, and its seat there."""

    uuid: str
    ledger: str
    instance: str

    @classmethod
    def of(cls, part: Part) -> Rank:
        """The rank whose part this is."""
        seat = part.seat
        return cls(part.device.info.uuid, str(seat.ledger.path), seat.instance.key)


def parts_of(scheduler: Any, *, states: bool) -> dict[str, Part]:
    """The memory of a scheduler's pools, by kind: `full`, `swa`, `mamba`.

    Raises
    ------
    UnsupportedError
        Some pool allocated its own.
    """
    pools = {"full": scheduler.token_to_kv_pool_allocator.get_kvcache()}
    if scheduler.is_hybrid_swa:
        pools = {"full": pools["full"].full_kv_pool, "swa": pools["full"].swa_kv_pool}
    elif "full_kv_pool" in vars(pools["full"]):
        pools["full"] = pools["full"].full_kv_pool
    if states:
        pools["mamba"] = scheduler.req_to_token_pool.mamba_pool
    found = {kind: part_of(pool) for kind, pool in pools.items()}
    parts = {kind: part for kind, part in found.items() if part is not None}
    missing = [type(pools[kind]).__name__ for kind in found if kind not in parts]
    if missing:
        import sglang

        raise UnsupportedError(
            f"SGLang {sglang.__version__} keeps this model's cache in {', '.join(missing)}, "
            "which allocates in a way that kvtide does not know"
        )
    return parts


def slots_of(scheduler: Any, kind: str) -> Slots:
    """The allocator of one kind of slots, and what the tree holds of them."""
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    if kind == "mamba":
        return Slots(scheduler.req_to_token_pool.mamba_allocator, cached_by(tree, kind, 1))
    if scheduler.is_hybrid_swa:
        allocator = vars(allocator)[f"{kind}_attn_allocator"]
    return Slots(allocator, cached_by(tree, kind, scheduler.page_size))
