"""What engines here may not see of each other: containers, users, and how a GPU is shared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvtide.errors import LedgerError
from kvtide.ledger import Ledger
from kvtide.observe.findings import Finding, note, ok, wrong
from kvtide.settings import Settings
from kvtide.units import MIB, format_size

__all__ = ["check_isolation"]

# The inode of the first pid namespace of a kernel, a constant of Linux.
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC
_SHARED: Final = Path("/dev/shm")
# Less than a bare context takes: no process with one stays below it.
_UNEXPLAINED_BYTES: Final = 256 * MIB


def check_isolation(
    settings: Settings, environ: Mapping[str, str], nvml: Callable[[], Any] | None = None
) -> Iterator[Finding]:
    """Look for others on the devices. `nvml` gives the library, or None where there is none."""
    contained = _contained()
    yield from _check_container(settings.dir, contained)
    yield from _check_users(settings.dir)
    library = (nvml or _load)()
    if library is None:
        if Path("/dev/nvidiactl").exists():
            yield note(
                "nvidia-ml-py",
                "not installed: processes on the GPUs, MIG and MPS cannot be looked at",
                "pip install nvidia-ml-py",
            )
        return
    try:
        library.nvmlInit()
        for number in range(library.nvmlDeviceGetCount()):
            handle = library.nvmlDeviceGetHandleByIndex(number)
            yield from _check_gpu(library, handle, settings.dir, contained, environ)
    except library.NVMLError as error:
        yield note("nvml", f"it does not answer: {error}", "look at nvidia-smi")


def _load() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _contained() -> bool:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino != _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _check_container(directory: Path, contained: bool) -> Iterator[Finding]:
    about = "container"
    if not contained:
        yield ok(about, "none: every process of this machine is seen from here")
        return
    yield note(
        about,
        "this is a container: processes of other containers are not seen from here",
        f"engines of several containers share a device only with one ledger: mount {directory} "
        "into each, with the same KVTIDE_DIR and user",
    )


def _check_users(directory: Path) -> Iterator[Finding]:
    """Other users' ledgers: theirs and ours account for the same device apart."""
    others = [
        path
        for path in sorted(_SHARED.glob("kvtide-*"))
        if path != directory and path.is_dir() and not path.is_symlink()
    ]
    for path in others:
        owner = path.stat().st_uid
        if owner != os.geteuid():
            yield note(
                "users",
                f"user {owner} has ledgers of their own in {path}",
                "if their engines use the same device, each side takes the other's memory for "
                "lost; run the engines of one device as one user",
            )


def _check_gpu(
    library: Any, handle: Any, directory: Path, contained: bool, environ: Mapping[str, str]
) -> Iterator[Finding]:
    uuid = _text(library.nvmlDeviceGetUUID(handle))
    about = f"gpu {uuid}"
    yield from _check_mode(library, handle, about)
    yield from _check_mps(about, environ)
    if _mig(library, handle):
        return
    pids, held_bytes = _explained(directory, uuid)
    processes = library.nvmlDeviceGetComputeRunningProcesses(handle)
    strangers = [p for p in processes if p.pid not in pids]
    unexplained_bytes = library.nvmlDeviceGetMemoryInfo(handle).used - held_bytes
    if contained:
        # Pids are those of another namespace: only sums can be compared.
        if not pids and unexplained_bytes > _UNEXPLAINED_BYTES:
            yield note(
                about,
                f"{format_size(unexplained_bytes)} are in use, and no record explains them",
                "if these are engines under kvtide in other containers, have all share KVTIDE_DIR",
            )
        return
    for process in strangers:
        size = process.usedGpuMemory
        shown = "memory" if size is None else format_size(size)
        yield note(
            about,
            f"process {process.pid} holds {shown} that no record explains",
            "it lowers what can be lent; if it is an engine, start it under kvtide with the same "
            "KVTIDE_DIR",
        )
    if not strangers:
        yield ok(about, "every process on it is explained by a record")


def _explained(directory: Path, uuid: str) -> tuple[set[int], int]:
    """Pids of a device's records, and what they are known to hold."""
    try:
        for path in Ledger.existing(directory):
            if path.stem == uuid:
                with Ledger.read(path) as observer:
                    snapshot = observer.snapshot()
                pools = [pool for i in snapshot.instances for pool in i.pools]
                beside_bytes = sum(i.non_kv_bytes for i in snapshot.instances)
                pids = {pool.pid for pool in pools} | {i.pid for i in snapshot.instances}
                return pids, beside_bytes + sum(pool.mapped_bytes for pool in pools)
    except LedgerError:
        pass  # said elsewhere
    return set(), 0


def _check_mode(library: Any, handle: Any, about: str) -> Iterator[Finding]:
    mode = library.nvmlDeviceGetComputeMode(handle)
    if mode == library.NVML_COMPUTEMODE_PROHIBITED:
        yield wrong(about, "its compute mode is Prohibited", "nvidia-smi -c DEFAULT")
    elif mode == library.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS:
        yield wrong(
            about,
            "its compute mode is Exclusive_Process: only one process can use it",
            "nvidia-smi -c DEFAULT, or run the engines under MPS",
        )
    if _mig(library, handle):
        yield note(
            about,
            "MIG is on: each slice is a device of its own, with a ledger of its own",
            "engines share memory only within one slice: CUDA_VISIBLE_DEVICES=MIG-...",
        )


def _mig(library: Any, handle: Any) -> bool:
    try:
        current, _ = library.nvmlDeviceGetMigMode(handle)
    except library.NVMLError:  # this kind of GPU has none
        return False
    return bool(current)


def _check_mps(about: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    pipes = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    if not (pipes / "control").exists():
        return
    yield note(
        about,
        f"MPS is on ({pipes}): the driver counts the clients' memory for the MPS server",
        "the ledger is exact all the same; a fault of one engine may end all of them",
    )
    limit = environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
    if limit:
        yield wrong(
            about,
            f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={limit!r} caps memory behind the ledger's back",
            "unset it and use kvtide limit",
        )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
