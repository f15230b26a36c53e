"""A server from its start to its end, and what must hold of any that was watched so."""

from __future__ import annotations

import contextlib
import http.client
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvtide.verify.answers import Answer
from kvtide.verify.servers import Server, ServerError
from kvtide.verify.site import Site, until
from kvtide.verify.verdict import Check

__all__ = ["Life", "drop_cache", "end_checks", "find_errors", "lived", "ready_check"]

_READY_SECONDS = 900.0
_STOP_SECONDS = 90.0
_HEALTHY_SECONDS = 30.0
_ORDERLY = (0, -2, 130)  # by itself, or by the signal that it was sent
_ERRORS = re.compile(
    r"Traceback \(most recent call last\)|\bERROR\b|\bCRITICAL\b|[Ss]egmentation fault|core dumped"
    r"|CUDA error|[Oo]ut of memory|leaked |Exception ignored|AssertionError"
)
# What an engine says of itself at its end, natively too: multiprocessing's, and triton's bindings.
_HARMLESS = re.compile(
    r"resource_tracker: There appear to be \d+ leaked|^nanobind: leaked \d+|^ - leaked \w+ "
)
_SHOWN = 5
_TRACEBACK = "Traceback (most recent call last):"


class Life(msgspec.Struct):
    """What was seen of one server.

    Attributes
    ----------
    ready
        It answered in time; otherwise `error` says what it did instead.
    phases
        Answers by phase, in order.
    cache_dropped
        Whether it said yes to dropping its prefix cache.
    alive
        It answered after all that was asked of it.
    exit_status, killed
        Of the outermost process; how many processes had to be killed.
    left_pids
        Processes that were there after all this.
    log_errors
        Lines of its log that tell of an error.
    registered
        It was in the ledger while it ran.
    left_bytes, left_records
        Memory and records of the device that were there after its end.
    blocks
        Of its KV cache, as they stood in the ledger.
    """

    name: str
    native: bool
    log: str
    ready: bool = False
    error: str | None = None
    phases: dict[str, tuple[Answer, ...]] = {}
    cache_dropped: bool = False
    alive: bool = False
    exit_status: int | None = None
    killed: int = 0
    left_pids: tuple[int, ...] = ()
    log_errors: tuple[str, ...] = ()
    registered: bool = False
    left_bytes: int = 0
    left_records: int = 0
    blocks: int = 0


@contextlib.contextmanager
def lived(site: Site, server: Server, name: str, *, native: bool) -> Iterator[Life]:
    """Start a server and wait for it; inside the block it serves; then stop it and look again.

    A server that does not start, or dies inside the block, ends the block's work and is in the
    life that is yielded; nothing is raised for it.
    """
    life = Life(name, native, str(server.log))
    try:
        _start(site, server, life)
        yield life
        life.alive = life.ready and until(server.healthy, _HEALTHY_SECONDS) is not None
    finally:
        server.stop(_STOP_SECONDS)
        life.exit_status, life.killed = server.exit_status(), len(server.killed)
        life.left_pids = tuple(server.pids())
        # Only what is its own: a neighbour on the device may live on.
        left = site.instances(name)
        life.left_records = len(left)
        life.left_bytes = sum(instance.charged_bytes for instance in left)
        life.log_errors = tuple(find_errors(Path(server.log), server.end_mark, server.end_noise))


def _start(site: Site, server: Server, life: Life) -> None:
    if not server.started:
        server.start()
    try:
        server.wait_ready(_READY_SECONDS)
    except ServerError as error:
        life.error = str(error)
        return
    life.ready = True
    instance = site.instance(life.name)
    life.registered = instance is not None and bool(instance.pools)
    life.blocks = instance.pools[0].blocks_total if instance and instance.pools else 0


def drop_cache(server: Server, life: Life) -> None:
    """Have it forget its prefix cache, and note whether it did."""
    try:
        server.drop_cache()
        life.cache_dropped = True
    except (OSError, http.client.HTTPException):
        life.cache_dropped = False


def find_errors(log: Path, end_mark: str = "", end_noise: str = "") -> list[str]:
    """The first lines of a log that tell of an error.

    From the line with `end_mark` on, those that match `end_noise` are the engine's own way to end;
    a traceback is matched with what was raised behind it.
    """
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    ending, found = False, []
    for number, line in enumerate(lines):
        ending = ending or bool(end_mark and end_mark in line)
        told = line
        if line == _TRACEBACK:
            told += next((f" {n}" for n in lines[number + 1 :] if n and not n.startswith(" ")), "")
        noise = _HARMLESS.search(line) or (ending and end_noise and re.search(end_noise, told))
        if _ERRORS.search(line) and not noise:
            found.append(line)
    return found[:_SHOWN]


def ready_check(life: Life) -> Check:
    """It answered in time."""
    why = (life.error or "").splitlines()
    return Check("server_ready", life.ready, "yes" if life.ready else " ".join(why[:1]))


def end_checks(life: Life, *, native: Sequence[str] = ()) -> list[Check]:
    """What must hold of any server that was watched to its end.

    `native`: errors that the native engine's log has too, which are not kvtide's.
    """
    own = [line for line in life.log_errors if _shape(line) not in {_shape(n) for n in native}]
    checks = []
    if life.ready:  # else nothing was asked of it
        found = "yes" if life.alive else "no answer"
        checks.append(Check("server_alive_after_load", life.alive, found))
    checks += [
        Check(
            "clean_exit_on_signal",
            life.killed == 0 and life.exit_status in _ORDERLY,
            f"status {life.exit_status}, {life.killed} processes killed",
        ),
        Check("no_error_signatures", not own, own[0][:200] if own else "none in its log"),
        Check("no_process_left", not life.left_pids, f"{len(life.left_pids)} left"),
    ]
    if life.native:
        checks.append(
            Check(
                "kvtide_inactive",
                not life.registered,
                "in no ledger" if not life.registered else "it is in the ledger",
            )
        )
        return checks
    if life.ready:
        blocks = f"{life.blocks} blocks in the ledger"
        checks.append(Check("kvtide_active", life.registered, blocks))
    return [
        *checks,
        Check(
            "ledger_empty_after_exit",
            life.left_records == 0 and life.left_bytes == 0,
            f"{life.left_records} records, {life.left_bytes} bytes",
        ),
    ]


def _shape(line: str) -> str:
    """A line of a log without what differs from run to run."""
    return re.sub(r"\d+", "0", line)
