"""One device's ledger, as a process that takes part in it sees it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvtide.errors import LedgerError
from kvtide.ledger import layout as w
from kvtide.ledger.account import Account
from kvtide.ledger.creation import spec_of
from kvtide.ledger.directory import ledger_path, ledgers_in
from kvtide.ledger.file import LedgerFile
from kvtide.ledger.holdings import reasons_now, waiting
from kvtide.ledger.instance import Instance
from kvtide.ledger.owing import ask_demands, end_trim, may_owe, trims
from kvtide.ledger.reading import Observer, take_snapshot
from kvtide.ledger.records import DeviceSpec, Snapshot, Terms
from kvtide.ledger.registration import add_instance, add_pool
from kvtide.ledger.retirement import retire, suspects
from kvtide.ledger.sampling import take_sample
from kvtide.ledger.sharing import Demand, Reason
from kvtide.ledger.steering import ask_to_trim, change_terms
from kvtide.ledger.wake import Bell

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
        try:
            self.bell = Bell(file.directory_fd, file.path.stem)
        except LedgerError:
            file.close()
            raise
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
        """Open a ledger that exists, to steer instances or retire the dead. Raises as `open`."""
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

    def register(
        self,
        name: str,
        *,
        explicit: bool,
        limit_bytes: int | None = None,
        min_bytes: int = 0,
        priority: int = 0,
        headroom_bytes: int = 0,
    ) -> Instance:
        """Become an instance, with its terms in force from the first byte; holds its lease.

        A name whose owner has died but whose pools are still ending is waited for, 5 s at most.
        A default name (not explicit) that is taken gets `-2`, `-3`, and so on.

        Raises
        ------
        NameTakenError
            The explicit name is live.
        LedgerError
            The ledger is full, its device is not the one that it was opened for, or the budget
            does not back the min beside those of others.
        UsageError
            The name or the terms cannot be had.
        """
        terms = Terms(limit_bytes, min_bytes, priority, headroom_bytes)
        slot, generation = add_instance(self, name, terms, explicit=explicit)
        return Instance(self, slot, generation, owner=True)

    def instance(self, key: str) -> Instance:
        """Attach to an instance that another process registered.

        Raises
        ------
        LedgerError
            It is gone.
        """
        self._check_open()
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
        self._check_open()
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
        self._check_open()
        ended = self.end_dead()
        if ended and self._held:
            self._held[0].sample()
        return ended

    def set_terms(
        self, name: str, change: Callable[[Terms], Terms], revision: int | None = None
    ) -> tuple[Terms, int]:
        """Set an instance's limit, min, priority and headroom from what they were, and wake it.

        `revision`, if given, is the one that the caller saw: if it is not the current one any more,
        somebody else has changed the terms meanwhile. Returns them as they are now with their
        revision; raises as `steering.change_terms`.
        """
        return change_terms(self, name, change, revision)

    def set_limit(self, name: str, limit_bytes: int | None, revision: int | None = None) -> int:
        """Set an instance's ceiling alone; the new revision. Raises as `set_terms`."""
        return self.set_terms(name, lambda t: t._replace(limit_bytes=limit_bytes), revision)[1]

    def ask_to_trim(self, name: str, to_bytes: int = 0, *, running: bool = False) -> int:
        """Ask an instance to give back down to a size, once; what it will come to at least.

        Of what it holds idle, or with `running` of what its running requests hold too. Raises as
        `steering.ask_to_trim`.
        """
        return ask_to_trim(self, name, to_bytes, running=running)

    def sample(self, sampler: Callable[[], int]) -> bool:
        """Measure free memory in a process that holds no pool yet; as `Account.sample`."""
        self._check_open()
        return take_sample(self, sampler)

    def is_trimming(self, key: str) -> bool:
        """Whether an instance has not done yet what `ask_to_trim` asked of it."""
        self._check_open()
        slot, generation = _parse(key, w.MAX_INSTANCES)
        words, at = self.file.words, w.instance_at(slot)
        return trims(words, at) and bool(words[at] == generation)

    def trim_asked(self, instance: Instance) -> int | None:
        """The number of what was asked of an instance by `ask_to_trim` and is not done; or None."""
        self._check_open()
        words, at = self.file.words, w.instance_at(instance.slot)
        return words[at + w.I_TRIM_ASKED] if trims(words, at) else None

    def end_trim(self, instance: Instance, asked: int | None = None) -> None:
        """The instance can give no more of what it was asked to, now or by that number."""
        self._check_open()
        end_trim(self.file.words, w.instance_at(instance.slot), asked)

    def is_owing(self, instance: Instance) -> bool:
        """Whether something may be demanded of an instance: for every step, without the lock."""
        self._check_open()
        return may_owe(self.file.words, instance.slot)

    def snapshot(self) -> Snapshot:
        """The ledger at one moment, without its lock.

        Raises
        ------
        LedgerBusyError
            It kept changing.
        """
        self._check_open()
        return take_snapshot(self.file.raw, self.file.words, self.file.is_leased)

    def demand(self, instance: Instance) -> int:
        """Bytes that this instance should begin to give back now, from its idle memory.

        As `demands`, which see.
        """
        return self.demands(instance).idle_bytes

    def demands(self, instance: Instance) -> Demand:
        """What this instance should begin to give back now; for its own process alone.

        For its own limit, because somebody asked it to, and for others' needs as `sharing.demands`
        shares them. Publish the pools' figures first: of idle memory that nobody knows of nothing
        is asked. Asking answers a call, so holders who do not ask are passed over. Cheap when
        nobody needs anything.
        """
        self.file.check_whole()
        return ask_demands(self.file.words, instance.slot)

    def reason(self, instance: Instance) -> Reason | None:
        """For what most of it is demanded, for observers; None where nothing is."""
        self._check_open()
        return reasons_now(self.file.words).get(instance.slot)

    # ---- for the parts of this package ----

    def _check_open(self) -> None:
        self.file.check()

    def try_to_end_dead(self) -> None:
        """For closing, which must not fail because the file was removed or replaced."""
        with suppress(LedgerError):
            self.end_dead()

    def end_dead(self) -> int:
        """`retire_dead` without the sample."""
        self.file.check_whole()
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


def _parse(key: str, slots: int) -> tuple[int, int]:
    slot, _, generation = key.partition(":")
    if not (slot.isdecimal() and generation.isdecimal() and int(slot) < slots):
        raise LedgerError(f"{key!r} is not the key of a record")
    return int(slot), int(generation)
