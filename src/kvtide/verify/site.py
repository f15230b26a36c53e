"""The devices of one case, with their ledgers, logs, and the servers that run on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtide.device.census import used_bytes
from kvtide.ledger import InstanceView, Ledger, Snapshot
from kvtide.verify.servers import Options, Server

__all__ = ["Model", "Site", "until"]

_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Model:
    """A model to serve, and as what: `exact` where its tokens do not hang on batching."""

    name: str
    path: Path
    dtype: str

    @property
    def exact(self) -> bool:
        """Whether tokens must be equal to the last one: in 32 bits."""
        return self.dtype == "float32"


def until(condition: Callable[[], object], seconds: float) -> float | None:
    """Wait until something holds; the seconds that it took, None where it never did."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            return None
        time.sleep(_LOOK_SECONDS)
    return time.monotonic() - started


class Site:
    """Devices of its own: no other program's memory is in the picture.

    A server of one rank is on the first of them. What is asked of the device is asked of the one
    that most instances share.

    Parameters
    ----------
    directory
        Empty; takes the ledger and what servers leave in passing.
    logs
        Where the servers' logs go, by the server's name.
    size_bytes
        Of each device; on a GPU what may be used of it.
    layout
        `KVTIDE_LAYOUT`.
    devices
        How many host devices the ranks of a server take in turn.

    Attributes
    ----------
    uuids
        Of the host devices.
    """

    def __init__(
        self,
        directory: Path,
        logs: Path,
        *,
        backend: str,
        size_bytes: int,
        layout: str = "auto",
        devices: int = 1,
        extra: dict[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.size_bytes = size_bytes
        self._directory = directory
        self._ledgers = directory / "ledgers"
        self._logs = logs
        self._extra = extra or {}
        self.uuids = [f"verify-{time.monotonic_ns()}-{number}" for number in range(devices)]
        own = {
            "host": {
                "KVTIDE_HOST_DEVICE": ",".join(self.uuids),
                "KVTIDE_HOST_MEMORY": str(size_bytes),
            },
            "cuda": {"KVTIDE_BUDGET": str(size_bytes)},
        }
        self._environ = {
            "KVTIDE": "1",
            "KVTIDE_DIR": str(self._ledgers),
            "KVTIDE_LAYOUT": layout,
            **own[backend],
        }
        directory.mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)

    def server(
        self,
        kind: type[Server],
        model: Model,
        name: str,
        options: Options,
        *,
        native: bool = False,
        python: str | None = None,
    ) -> Server:
        """A server that is not started yet, under kvtide or natively."""
        temporary = {"TMPDIR": str(self._directory), "VLLM_RPC_BASE_PATH": str(self._directory)}
        own = {} if native else self._environ | {"KVTIDE_NAME": name}
        log = self._logs / f"{name}.log"
        log.unlink(missing_ok=True)
        given = {} if python is None else {"python": python}
        return kind(
            model.path,
            log=log,
            arguments=[*kind.flags(options, model.path), *options.flags],
            environ=temporary | kind.environ_for(options, self.backend) | own | self._extra,
            **given,
        )

    def snapshots(self) -> list[Snapshot]:
        """The ledgers now, first that of the device that most instances share."""
        return [snapshot for _, snapshot in self._looks()]

    def _looks(self) -> list[tuple[Path, Snapshot]]:
        found = []
        for path in sorted(Ledger.existing(self._ledgers)):
            with Ledger.read(path) as observer:
                found.append((path, observer.snapshot()))
        return sorted(found, key=lambda look: -len(look[1].instances))

    def snapshot(self) -> Snapshot | None:
        """The device's ledger now; None before there is one."""
        return next(iter(self.snapshots()), None)

    def instances(self, name: str) -> list[InstanceView]:
        """An instance on every device that it is on, in the order of `snapshots`."""
        return [i for snapshot in self.snapshots() for i in snapshot.instances if i.name == name]

    def instance(self, name: str) -> InstanceView | None:
        """An instance on the device, or None."""
        return next(iter(self.instances(name)), None)

    def charge(self, name: str) -> int:
        """What an instance answers for; 0 without one."""
        instance = self.instance(name)
        return 0 if instance is None else instance.charged_bytes

    def free_bytes(self) -> int:
        """What could be granted now; 0 without a ledger."""
        snapshot = self.snapshot()
        return 0 if snapshot is None else snapshot.free_bytes

    def set_limit(self, name: str, limit_bytes: int | None) -> None:
        """Set an instance's limit on the device, as `kvtide limit` does."""
        for path, _ in self._looks()[:1]:
            ledger = Ledger.attach(path)
            try:
                ledger.set_limit(name, limit_bytes)
            finally:
                ledger.close()

    def left_bytes(self) -> int:
        """What processes still hold of a host device, by the kernel; on a GPU what is charged."""
        if self.backend == "host":
            return sum(map(used_bytes, self.uuids))
        return sum(snapshot.charged_bytes for snapshot in self.snapshots())
