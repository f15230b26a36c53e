"""One device's ledger, as a process that takes part in it sees it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvtide.errors import LedgerError, StaleRevisionError, UsageError
from kvtide.ledger import layout as w
from kvtide.ledger.account import Account
from kvtide.ledger.creation import spec_of
from kvtide.ledger.directory import ledger_path, ledgers_in
from kvtide.ledger.file import LedgerFile
from kvtide.ledger.holdings import anybody_wishes, demands_now, waiting
from kvtide.ledger.instance import Instance
from kvtide.ledger.reading import Observer, take_snapshot
from kvtide.ledger.records import DeviceSpec, Snapshot
from kvtide.ledger.registration import add_instance, add_pool
from kvtide.ledger.retirement import live_instances, pools_of, retire, suspects
from kvtide.ledger.wake import Bell
from kvtide.units import format_size

__all__ = ["Ledger"]


class Ledger:
    """An open ledger. Threads may share it; a forked child may not use it.

    Attributes
    ----------
    spec
        The device as the file has it.
    """

    def __init__(self, file: LedgerFile) -> None:
        """Use `open` or `attach`."""
        self.file = file
        self.spec = spec_of(file.raw)
        self.bell = Bell(file.directory_fd, file.path.stem)
        self.owing: set[Account] = set()
        self._held: list[Account] = []

    @classmethod
    def open(cls, directory: Path, spec: DeviceSpec) -> Ledger:
        """Open a device's ledger; make it, and the directory, where there is none.

        A file of another layout, device, total, margin or cap is made anew if no process lives by
        it.

        Raises
        ------
        LedgerError
            The directory or the file cannot be trusted, read or made; the message says what to do.
        """
        return cls(LedgerFile.create(ledger_path(directory, spec.uuid), spec))

    @classmethod
    def attach(cls, path: Path) -> Ledger:
        """Open a ledger that exists, to change limits or retire the dead. Raises as `open`."""
        return cls(LedgerFile.attach(path))

    @staticmethod
    def existing(directory: Path) -> list[Path]:
        """The ledgers of a directory; none if it does not exist. Raises as `open`."""
        return ledgers_in(directory)

    @staticmethod
    def read(path: Path) -> Observer:
        """Open a ledger for reading alone. Raises as `open`."""
        return Observer(path)

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    def close(self) -> None:
        """Drop every lease that is held through this object; the records are retired by others."""
        self.bell.close()
        self.file.close()

    # ---- taking part ----

    def register(self, name: str, *, limit_bytes: int | None = None, explicit: bool) -> Instance:
        """Become an instance, with its limit in force from the first byte; holds its lease.

        A name whose owner has died but whose pools are still ending is waited for, 5 s at most.
        A default name (not explicit) that is taken gets `-2`, `-3`, and so on.

        Raises
        ------
        NameTakenError
            The explicit name is live.
        LedgerError
            The ledger is full, or its device is not the one that it was opened for.
        UsageError
            The name or the limit cannot be one.
        """
        slot, generation = add_instance(self, name, limit_bytes, explicit=explicit)
        return Instance(self, slot, generation, owner=True)

    def instance(self, key: str) -> Instance:
        """Attach to an instance that another process registered.

        Raises
        ------
        LedgerError
            It is gone.
        """
        slot, generation = _parse(key, w.MAX_INSTANCES)
        if self.file.words[w.instance_at(slot)] != generation:
            raise LedgerError(f"instance {key} is gone: its owner died or closed it")
        return Instance(self, slot, generation, owner=False)

    def enroll(
        self,
        instance: Instance,
        *,
        pool_name: str,
        rank: int,
        blocks_total: int,
        block_bytes: int,
        sampler: Callable[[], int],
    ) -> Account:
        """Open a pool's account in the process that will hold its memory; it samples once.

        `sampler` says how many bytes of the device are free, as its driver or kernel counts them.

        Raises
        ------
        LedgerError
            The instance is gone, or the ledger is full.
        UsageError
            The name or the sizes cannot be a pool's.
        """
        slot, generation = add_pool(self, instance, pool_name, rank, blocks_total, block_bytes)
        account = Account(self, slot, generation, sampler)
        self._held.append(account)
        account.sample()
        return account

    def account(self, key: str) -> Account:
        """Attach to a pool that another process holds.

        Raises
        ------
        LedgerError
            It is gone.
        """
        slot, generation = _parse(key, w.MAX_POOLS)
        if self.file.words[w.pool_at(slot)] != generation:
            raise LedgerError(f"pool {key} is gone: its holder died or closed it")
        return Account(self, slot, generation, None)

    def forget(self, account: Account) -> None:
        """Drop an account that closes."""
        self.owing.discard(account)
        if account in self._held:
            self._held.remove(account)

    # ---- what everybody may do ----

    def retire_dead(self) -> int:
        """End every record whose lease the kernel has dropped; how many. Cheap when there is none.

        Wakes who waits, and where this process holds a pool takes the sample that finds what the
        dead left. 0 too when the ledger is busy.
        """
        if self.file.closed is not None:
            raise LedgerError(self.file.closed)
        ended = self.end_dead()
        if ended and self._held:
            self._held[0].sample()
        return ended

    def set_limit(self, name: str, limit_bytes: int | None, revision: int | None = None) -> int:
        """Set an instance's ceiling and wake it; the new revision.

        `revision`, if given, is the one that the caller saw: if it is not the current one any more,
        somebody else has changed the limit meanwhile.

        Raises
        ------
        StaleRevisionError
            The revision is not the current one.
        LedgerError
            No instance has this name.
        UsageError
            The limit is negative, or below what the instance can never give back.
        """
        if limit_bytes is not None and not 0 <= limit_bytes < 1 << 62:
            raise UsageError(f"a limit cannot be {limit_bytes} bytes")
        with self.file.change() as words:
            at = self._find(words, name)
            current: int = words[at + w.I_REVISION]
            limit_now = words[at + w.I_LIMIT]
            if revision is not None and revision != current:
                now = "none" if limit_now == w.NONE else format_size(limit_now)
                raise StaleRevisionError(
                    f"the limit of {name!r} is {now} at revision {current}, and this change was "
                    f"made against revision {revision}; look again and repeat it"
                )
            slot = (at - w.INSTANCES_AT) // w.RECORD_WORDS
            pinned = sum(words[w.pool_at(s) + w.P_PINNED] for s in pools_of(words, slot))
            if limit_bytes is not None and limit_bytes < pinned:
                raise UsageError(
                    f"a limit of {format_size(limit_bytes)} is below what {name!r} can never give "
                    f"back; the smallest that works is {format_size(pinned)}"
                )
            # The revision first: dying here makes a caller look again, never overwrite.
            words[at + w.I_REVISION] = current + 1
            words[at + w.I_LIMIT] = w.NONE if limit_bytes is None else limit_bytes
            generation = words[at]
            waits = waiting(words, slot)
        self.bell.ring([(slot, generation), *waits])
        return current + 1

    def snapshot(self) -> Snapshot:
        """The ledger at one moment, without its lock.

        Raises
        ------
        LedgerBusyError
            It kept changing.
        """
        if self.file.closed is not None:
            raise LedgerError(self.file.closed)
        return take_snapshot(self.file.raw, self.file.words, self.file.is_leased)

    def demand(self, instance: Instance) -> int:
        """Bytes that this instance should begin to give back now, from its idle memory.

        For its own limit, and for others' wishes as `policy.demands` shares them. Publish the
        pools' figures first: of idle memory that nobody knows of nothing is asked. Cheap when
        nobody wishes.
        """
        if self.file.closed is not None:
            raise LedgerError(self.file.closed)
        words = self.file.words
        limited = words[w.instance_at(instance.slot) + w.I_LIMIT] != w.NONE
        if not limited and not anybody_wishes(words):
            return 0
        return demands_now(words).get(instance.slot, 0)

    # ---- for the parts of this package ----

    def try_to_end_dead(self) -> None:
        """For closing, which must not fail because the file was removed or replaced."""
        with suppress(LedgerError):
            self.end_dead()

    def end_dead(self) -> int:
        """`retire_dead` without the sample."""
        if self.owing:
            self.pay()
        if not suspects(self.file):
            return 0
        ended = 0
        gone: list[tuple[int, int]] = []
        waits: list[tuple[int, int]] = []
        try:
            if not self.file.begin():
                return 0
            ended, gone = retire(self.file)
            waits = waiting(self.file.words, None)
        finally:
            self.file.end()
        self.bell.sweep(gone)
        if ended:
            self.bell.ring(waits)
        return ended

    def pay(self) -> None:
        """Make the refunds that this process owes, for which the ledger was too busy."""
        waits: list[tuple[int, int]] = []
        try:
            if not self.file.begin():
                return
            words = self.file.words
            while self.owing:
                self.owing.pop().pay_owed(words)
            waits = waiting(words, None)
        finally:
            self.file.end()
        self.bell.ring(waits)

    def _find(self, words: memoryview, name: str) -> int:
        names = {}
        for slot in live_instances(words):
            at = w.instance_at(slot)
            names[w.get_text(self.file.raw, at + w.I_NAME, w.NAME_BYTES)] = at
        if name not in names:
            there = ", ".join(sorted(names)) or "none at all"
            raise LedgerError(f"no instance {name!r} on {self.spec.uuid}; there is {there}")
        return names[name]


def _parse(key: str, slots: int) -> tuple[int, int]:
    slot, _, generation = key.partition(":")
    if not (slot.isdecimal() and generation.isdecimal() and int(slot) < slots):
        raise LedgerError(f"{key!r} is not the key of a record")
    return int(slot), int(generation)
