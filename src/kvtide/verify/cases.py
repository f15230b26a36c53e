"""The cases of the matrix, in their order: what each starts, and who judges what was seen."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtide.units import GIB, MIB
from kvtide.verify.life import Life
from kvtide.verify.limit_case import judge_limit, run_limit
from kvtide.verify.model_case import KVTIDE, MAX_MODEL_LEN, NATIVE, judge_model, run_life
from kvtide.verify.order_case import judge_order, run_order
from kvtide.verify.pair_case import judge_pair, run_pair
from kvtide.verify.servers import Options, Server
from kvtide.verify.site import Model, Site
from kvtide.verify.verdict import Check

__all__ = ["Bench", "Case", "Seen", "Skipped", "make_cases", "select"]

_ROOMY_BYTES = 384 * MIB
# Of it, for all ranks: what finds no room in a cache is not found in it again, so that engines
# whose caches differ by a block differ in what they find.
_CACHE_BYTES = 352 * MIB
_TIGHT_BYTES = 96 * MIB
_SHORT_LEN = 2048
# Below what two engines of the smallest tiny model need for one request each.
_ORDER_BYTES = 96 * MIB
_REASON_CHARS = 300
# What is raised for it names it; an engine that ends for another reason has failed.
_LACKS_FP8 = re.compile(r"(?i:\b\w*(?:error|exception): .*(?:fp8|float8|cache.dtype).*)")
# An engine that ends so says itself that it has no kernel or backend for a model on this device.
_LACKS_KERNEL = re.compile(
    r"NotImplementedError: .*|\w*Error: No valid \S.* backend found.*"
    r"|\w*Error: '_OpNamespace' .* has no attribute .*"
)
# kvtide refuses by name a layout that a model, or its backend, cannot have.
_LACKS_LAYOUT = re.compile(r"KVTIDE_LAYOUT=block-major cannot be had: (.*)")

Judged = list[tuple[str, Check]]


class Skipped(Exception):  # noqa: N818 - an outcome, not an error
    """The engine or the machine does not have what a case is about; says what."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What a case may use.

    Attributes
    ----------
    kind
        The engine's server class.
    other
        Of the mixed pair: another engine's server class and its Python; None without one.
    flags
        Further flags of every server but the other engine's.
    work, logs
        Directories of this case alone.
    say
        Progress.
    """

    kind: type[Server]
    backend: str
    tp: int
    work: Path
    logs: Path
    say: Callable[[str], None]
    python: str | None = None
    other: tuple[type[Server], str] | None = None
    extra: dict[str, str] | None = None
    flags: tuple[str, ...] = ()

    def site(self, size_bytes: int, *, layout: str = "auto", devices: int = 1) -> Site:
        """Devices of its own for a case."""
        return Site(
            self.work,
            self.logs,
            backend=self.backend,
            size_bytes=size_bytes,
            layout=layout,
            devices=devices,
            extra=self.extra,
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What a case recorded, and what was judged of it."""

    record: Any
    checks: Judged


@dataclass(frozen=True, slots=True)
class Case:
    """One case: its name, and what runs it."""

    name: str
    run: Callable[[Bench], Seen]


def select(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """Those whose name one of the patterns matches, such as `model/*`; all without a pattern."""
    return [
        case
        for case in cases
        if not patterns or any(fnmatch.fnmatchcase(case.name, p) for p in patterns)
    ]


def make_cases(
    models: Sequence[Model], wide: Model, backend: str, lacks: Mapping[str, str] | None = None
) -> list[Case]:
    """All cases for these models; `wide` has a cache of many bytes a token, for the pairs.

    `lacks`: names of models that the engine does not run natively, and why.
    """
    lacks = lacks or {}
    layouts = ["per-layer"] if backend == "host" else ["per-layer", "block-major"]
    cases = [
        Case(f"model/{model.name}/{layout}", _model(model, layout, lacks.get(model.name)))
        for model in models
        for layout in layouts
    ]
    cases += [
        Case(f"fp8/{models[0].name}", _fp8(models[0])),
        Case(f"elastic/{wide.name}", _pair(wide)),
        Case(f"elastic/{wide.name}/tp2", _pair(wide, tp=2)),
        Case(f"elastic/{wide.name}/mixed", _pair(wide, mixed=True)),
        Case(f"limit/{wide.name}", _limit(wide)),
        Case(f"order/{wide.name}", _order(wide)),
        Case(f"sleep/{models[0].name}", _sleep),
    ]
    return cases


def _options(bench: Bench, model: Model, length: int = MAX_MODEL_LEN) -> Options:
    # On a GPU a tiny model would be given all of it: a size that both servers are given instead.
    given = None if bench.backend == "host" else GIB
    return Options(
        dtype=model.dtype,
        max_model_len=length,
        tp=bench.tp,
        kv_bytes=given,
        flags=bench.flags,
    )


def _both(bench: Bench, model: Model, options: Options, layout: str) -> Seen:
    site = bench.site(_ROOMY_BYTES if bench.backend == "host" else 2 * GIB, layout=layout)
    # Natively the size has to be given, else it is a share of the whole machine; and both the same.
    options = replace(options, kv_bytes=options.kv_bytes or _CACHE_BYTES // options.tp)
    first = site.server(bench.kind, model, NATIVE, options, native=True, python=bench.python)
    second = site.server(bench.kind, model, KVTIDE, options, python=bench.python)
    with contextlib.ExitStack() as stack:
        if bench.backend == "host":
            # Both start at once, since most of that is one thread's work; then one is asked at a
            # time. Native engines on a GPU do not take a neighbour that starts beside them.
            stack.enter_context(first)
            stack.enter_context(second)
        lives = [
            run_life(site, server, native=native, margins=not model.exact, say=bench.say)
            for server, native in ((first, True), (second, False))
        ]
    native, elastic = lives
    return Seen(lives, judge_model(native, elastic, exact=model.exact))


def _model(model: Model, layout: str, lacking: str | None) -> Callable[[Bench], Seen]:
    def run(bench: Bench) -> Seen:
        if lacking is not None:
            raise Skipped(f"{bench.kind.engine} does not run it here: {lacking}")
        seen = _both(bench, model, _options(bench, model), layout)
        native, elastic = seen.record
        if not native.alive and (why := _lack(_log_of(native), _LACKS_KERNEL)):
            raise Skipped(f"the native engine does not run it here: {why}")
        if layout == "block-major" and not elastic.ready:
            refused = _LACKS_LAYOUT.search(_log_of(elastic))
            if refused:
                raise Skipped(f"it has no block-major layout: {refused[1][:_REASON_CHARS]}")
        return seen

    return run


def _lack(told: str, says: re.Pattern[str]) -> str | None:
    """What a native engine that did not start, or ended, says that it lacks."""
    found = says.search(told)
    return found[0][:_REASON_CHARS] if found else None


def _log_of(life: Life) -> str:
    log = Path(life.log)
    return log.read_text(errors="replace") if log.exists() else ""


def _fp8(model: Model) -> Callable[[Bench], Seen]:
    def run(bench: Bench) -> Seen:
        # The kernels that read fp8 compute in 16 bits.
        low = replace(model, dtype="bfloat16")
        options = replace(_options(bench, low), kv_dtype="fp8")
        seen = _both(bench, low, options, "auto")
        native: Life = seen.record[0]
        if not native.ready and (why := _lack(native.error or "", _LACKS_FP8)):
            raise Skipped(f"the native engine has no fp8 KV cache here: {why}")
        return seen

    return run


def _pair(model: Model, *, tp: int | None = None, mixed: bool = False) -> Callable[[Bench], Seen]:
    def run(bench: Bench) -> Seen:
        if mixed and bench.other is None:
            raise Skipped("no other engine was named: give --other ENGINE=PYTHON")
        # Two ranks are on two devices, of which b shares the first: a's first rank is starved.
        size_bytes = _TIGHT_BYTES if bench.backend == "host" else GIB
        site = bench.site(size_bytes, devices=tp or 1)
        options = _options(bench, model, _SHORT_LEN)
        first = site.server(
            bench.kind, model, "a", replace(options, tp=tp or bench.tp), python=bench.python
        )
        kind, python = bench.kind, bench.python
        if mixed and bench.other is not None:
            kind, python = bench.other
            options = replace(options, flags=())
        second = site.server(kind, model, "b", options, python=python)
        record = run_pair(site, [("a", first), ("b", second)], bench.say)
        return Seen(record, [*judge_pair(record, exact=model.exact), _device_empty(site)])

    return run


def _limit(model: Model) -> Callable[[Bench], Seen]:
    def run(bench: Bench) -> Seen:
        site = bench.site(_TIGHT_BYTES if bench.backend == "host" else GIB)
        server = site.server(
            bench.kind, model, "a", _options(bench, model, _SHORT_LEN), python=bench.python
        )
        record = run_limit(site, "a", server, bench.say)
        return Seen(record, [*judge_limit(record, exact=model.exact), _device_empty(site)])

    return run


def _order(model: Model) -> Callable[[Bench], Seen]:
    def run(bench: Bench) -> Seen:
        site = bench.site(_ORDER_BYTES if bench.backend == "host" else 4 * GIB)
        # Not an explicit size: that the engine finds the same one is what is checked.
        options = replace(_options(bench, model, _SHORT_LEN), kv_bytes=None)

        def make(name: str) -> Server:
            return site.server(bench.kind, model, name, options, python=bench.python)

        record = run_order(site, make, bench.say)
        return Seen(record, [*judge_order(record), _device_empty(site)])

    return run


def _sleep(bench: Bench) -> Seen:
    raise Skipped(
        f"kvtide refuses {bench.kind.engine}'s sleep mode by name: an idle engine gives its memory "
        "back by itself"
    )


def _device_empty(site: Site) -> tuple[str, Check]:
    left = site.left_bytes()
    return "device", Check("device_empty_at_the_end", left == 0, f"{left} bytes")
