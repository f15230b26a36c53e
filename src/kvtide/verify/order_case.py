"""Two identical engines, started in either order and together: the same capacity, to the token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from kvtide.verify.life import Life, end_checks, lived
from kvtide.verify.servers import Server
from kvtide.verify.site import Site
from kvtide.verify.verdict import Check

__all__ = ["ORDERS", "OrderRecord", "judge_order", "run_order"]

ORDERS = ("a, then b", "b, then a", "together")


class OrderRecord(msgspec.Struct):
    """The lives of both servers for every order of starting them."""

    lives: dict[str, tuple[Life, ...]] = {}


def run_order(site: Site, make: Callable[[str], Server], say: Callable[[str], None]) -> OrderRecord:
    """Start them in every order; `make` gives a new server of a name."""
    record = OrderRecord()
    for order in ORDERS:
        say(order)
        names = ("b", "a") if order.startswith("b") else ("a", "b")
        servers = [(name, make(name)) for name in names]
        if order == "together":
            # Both are started before either is waited for.
            for _, server in servers:
                server.start()
        with contextlib.ExitStack() as stack:
            record.lives[order] = _start(stack, site, servers)
    return record


def _start(
    stack: contextlib.ExitStack, site: Site, servers: Sequence[tuple[str, Server]]
) -> tuple[Life, ...]:
    lives = []
    for name, server in servers:
        lives.append(stack.enter_context(lived(site, server, name, native=False)))
    return tuple(lives)


def judge_order(record: OrderRecord) -> list[tuple[str, Check]]:
    """What must hold whatever the order."""
    everyone = [life for lives in record.lives.values() for life in lives]
    ready = sum(life.ready for life in everyone)
    blocks = sorted({life.blocks for life in everyone})
    checks = [
        ("both", Check("ready", ready == len(everyone) > 0, f"{ready} of {len(everyone)}")),
        (
            "both",
            Check(
                "capacity_equal_in_any_order",
                len(blocks) == 1 and blocks[0] > 0,
                f"{' or '.join(map(str, blocks))} blocks",
            ),
        ),
    ]
    for order, lives in record.lives.items():
        checks += [
            (f"{life.name} ({order})", check) for life in lives for check in end_checks(life)
        ]
    return checks
