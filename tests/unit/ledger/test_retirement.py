import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtide.errors import LedgerError
from kvtide.ledger import Granted, Ledger, State
from kvtide.ledger import layout as w
from kvtide.units import MIB
from ledger_world import TOTAL, Member, enroll, spec, until


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def ledger(directory):
    ledger = Ledger.open(directory, spec())
    yield ledger
    ledger.close()


def test_the_living_are_never_retired(ledger, directory):
    enroll(ledger, "a")
    with Member(directory, "enroll(ledger, 'b')"):
        assert ledger.retire_dead() == 0
        assert len(ledger.snapshot().instances) == 2


def test_the_dead_lose_charge_and_budget_together_and_a_sample_finds_what_they_left(
    ledger, directory
):
    free = [TOTAL - 64 * MIB]
    body = "_, a = enroll(ledger, 'b'); a.grant(100 << 20); a.created(64 << 20)"
    with Member(directory, body) as member:
        _, account = enroll(ledger, "a", lambda: free[0])
        assert ledger.snapshot().free_bytes == TOTAL - 100 * MIB
        member.kill()
    until(lambda: not all(p.live for i in ledger.snapshot().instances for p in i.pools), "death")
    dead = ledger.snapshot().instances[0]
    assert (dead.state, dead.charged_bytes, dead.mapped_bytes) == (
        State.DEAD,
        100 * MIB,
        64 * MIB,
    )
    until(lambda: ledger.end_dead() or not ledger.snapshot().instances[1:], "retirement")
    snapshot = ledger.snapshot()
    assert snapshot.budget_bytes == TOTAL - 100 * MIB
    assert snapshot.free_bytes == TOTAL - 100 * MIB
    account.sample()  # the driver has not freed its memory yet
    assert ledger.snapshot().budget_bytes == TOTAL - 64 * MIB
    free[0] = TOTAL
    account.sample()
    assert account.grant(TOTAL) == Granted(TOTAL)


def test_a_free_record_whose_lease_somebody_still_holds_is_passed_over(ledger, directory):
    """The kernel drops a dying process's lock before its leases; who comes between takes others."""
    dying = Ledger.open(directory, spec())
    for at in (w.instance_at(0), w.instance_at(2), w.pool_at(0)):
        assert dying.file.take_lease(at)
    accounts = [enroll(ledger, name) for name in ("a", "b")]
    assert [(i.slot, a.key.partition(":")[0]) for i, a in accounts] == [(1, "1"), (3, "2")]
    assert accounts[0][1].grant(TOTAL) == Granted(TOTAL)
    assert [i.name for i in ledger.snapshot().instances] == ["a", "b"]
    dying.close()
    assert enroll(ledger, "c")[0].slot == 0


def test_records_that_are_all_live_or_still_leased_are_a_full_ledger(ledger, directory):
    dying = Ledger.open(directory, spec())
    for slot in range(w.MAX_POOLS):
        assert dying.file.take_lease(w.pool_at(slot))
    with pytest.raises(LedgerError, match="full"):
        enroll(ledger, "a")
    assert [i.pools for i in ledger.snapshot().instances] == [()]
    dying.close()


def test_who_retires_and_holds_memory_samples_at_once(ledger, directory):
    _, account = enroll(ledger, "a")
    with Member(directory, "enroll(ledger, 'b')[1].grant(1 << 20)") as member:
        member.kill()
    until(ledger.retire_dead, "retirement")
    until(lambda: ledger.retire_dead() == 0, "all")
    assert account.grant(TOTAL) == Granted(TOTAL)


def test_an_instance_outlives_its_owner_while_a_worker_lives(ledger, directory):
    with Member(directory, "i = ledger.register('b', explicit=True); print(i.key)") as owner:
        worker = ledger.enroll(
            ledger.instance(owner.said),
            pool_name="kv",
            rank=0,
            blocks_total=1,
            block_bytes=1,
            sampler=lambda: TOTAL,
        )
        ledger.instance(owner.said).wish(5)
        owner.kill()
    until(lambda: ledger.snapshot().instances[0].state is State.DEAD, "death")
    assert ledger.retire_dead() == 0
    assert ledger.snapshot().instances[0].wish_bytes == 0  # the dead wish for nothing
    assert worker.grant(MIB) == Granted(MIB)
    worker.close()
    assert ledger.snapshot().instances == ()


def test_a_dead_worker_is_retired_under_its_living_instance(ledger, directory):
    instance = ledger.register("a", explicit=True)
    body = (
        f"a = ledger.enroll(ledger.instance({instance.key!r}), pool_name='kv', rank=0, "
        "blocks_total=1, block_bytes=1, sampler=lambda: 1 << 28); a.grant(9); print(a.key)"
    )
    with Member(directory, body) as worker:
        account = ledger.account(worker.said)
        assert account.grant(1) == Granted(1)
        worker.kill()
    until(ledger.retire_dead, "retirement")
    assert account.grant(1).reason == "retired"
    account.refund(10)
    assert instance.live


def test_a_forked_child_keeps_no_lease_and_may_not_use_the_ledger(directory):
    forks = (
        "import os; i, a = enroll(ledger, 'b'); w = i.waker(); pid = os.fork()\n"
        "if pid == 0:\n"
        "    refused = 0\n"
        "    for use in (lambda: a.grant(1), lambda: a.created(1), a.sample, ledger.snapshot):\n"
        "        try: use()\n"
        "        except Exception as error: refused += 'forked from' in str(error)\n"
        "    os.write(1, b'%d %d\\n' % (refused, os.getpid()))\n"
        "    time.sleep(60)\n"
        "import select; os.set_blocking(0, True)"
    )
    ledger = Ledger.open(directory, spec())
    with Member(directory, forks + "\nimport time as t; t.sleep(0.2)") as parent:
        refused, child = map(int, parent.said.split())
        try:
            assert refused == 4
            parent.kill()
            # The child lives, and has the ledger mapped still.
            until(ledger.retire_dead, "the leases drop with the parent")
            os.kill(child, 0)
            assert "host.ledger" in Path(f"/proc/{child}/maps").read_text()
        finally:
            os.kill(child, 9)
    ledger.close()


def test_fork_and_exec_keep_no_lease(directory):
    ledger = Ledger.open(directory, spec())
    body = (
        "import subprocess; enroll(ledger, 'b'); "
        "child = subprocess.Popen(['sleep', '60']); print(child.pid)"
    )
    with Member(directory, body) as parent:
        child = int(parent.said)
        try:
            parent.kill()
            until(ledger.retire_dead, "the leases drop with the parent")
            os.kill(child, 0)
        finally:
            os.kill(child, 9)
    ledger.close()


def test_a_fork_while_another_thread_holds_the_lock_does_not_hang_the_child(directory):
    body = (
        "import os, threading; _, a = enroll(ledger, 'b')\n"
        "inside = threading.Event()\n"
        "def hold():\n"
        "    with ledger.file.change(): inside.set(); time.sleep(0.3)\n"
        "thread = threading.Thread(target=hold); thread.start(); inside.wait()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: a.grant(1)\n"
        "    except Exception as error: os._exit('forked from' in str(error))\n"
        "    os._exit(9)\n"
        "said = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "thread.join(); print(said, a.grant(1).granted_bytes)"
    )
    with Member(directory, body) as member:
        assert member.said == "1 1"


def test_threads_share_a_ledger(ledger):
    _, account = enroll(ledger, "a")
    lost = []

    def work():
        for _ in range(300):
            if account.grant(2) == Granted(2):
                account.refund(1)
            else:
                lost.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    account.grant(0)
    assert account.charge_bytes == 4 * 300 - len(lost)


def test_the_ledger_imports_nothing_heavy():
    heavy = {"torch", "numpy", "vllm", "cuda"}
    code = f"import sys, kvtide.ledger; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
