"""The doctor on what engines do not see of each other, and on what is left in the directory."""

from collections import namedtuple

import pytest

from kvtide.ledger import PoolFigures
from kvtide.observe import isolation
from kvtide.observe.health import check_ledgers
from kvtide.observe.isolation import check_isolation
from kvtide.observe.tally import Owner, Tally
from kvtide.settings import Settings
from kvtide.units import GIB, MIB
from observed_world import World

UUID = "GPU-00000000-1111-2222-3333-444444444444"
Process = namedtuple("Process", "pid usedGpuMemory")
Memory = namedtuple("Memory", "total free used")


class Nvml:
    """NVML with one GPU."""

    NVMLError = RuntimeError
    NVML_COMPUTEMODE_DEFAULT, NVML_COMPUTEMODE_PROHIBITED = 0, 2
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3

    def __init__(self, processes=(), *, mode=0, mig=None, used=0):
        self._processes, self._mode, self._mig, self._used = processes, mode, mig, used

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, number):  # noqa: N802
        return number

    def nvmlDeviceGetUUID(self, _):  # noqa: N802
        return UUID

    def nvmlDeviceGetComputeRunningProcesses(self, _):  # noqa: N802
        return list(self._processes)

    def nvmlDeviceGetMemoryInfo(self, _):  # noqa: N802
        return Memory(80 * GIB, 80 * GIB - self._used, self._used)

    def nvmlDeviceGetComputeMode(self, _):  # noqa: N802
        return self._mode

    def nvmlDeviceGetMigMode(self, _):  # noqa: N802
        if self._mig is None:
            raise RuntimeError("Not Supported")
        return self._mig, self._mig


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "ledgers", uuid=UUID, backend="cuda")
    yield made
    made.close()


@pytest.fixture
def found(world, monkeypatch, tmp_path):
    monkeypatch.setattr(isolation, "_SHARED", tmp_path / "shm")
    settings = Settings(dir=world.directory)

    def find(nvml, *, contained=False, **environ):
        monkeypatch.setattr(isolation, "_contained", lambda: contained)
        environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "none")} | environ
        return list(check_isolation(settings, environ, lambda: nvml))

    return find


def texts(findings, status):
    return [f.found for f in findings if f.status == status]


def test_processes_with_a_record_are_explained_and_others_named(world, found):
    pid = world.engine("chat").instance  # of this process
    import os

    mine = Process(os.getpid(), 4 * GIB)
    assert pid.live
    assert texts(found(Nvml([mine])), "note") == []
    (text,) = texts(found(Nvml([mine, Process(4711, 3 * GIB)])), "note")
    assert text == "process 4711 holds 3GiB that no record explains"
    (text,) = texts(found(Nvml([Process(4711, None)])), "note")
    assert text == "process 4711 holds memory that no record explains"


def test_in_a_container_memory_that_nobody_here_holds_is_told(world, found):
    notes = texts(found(Nvml(used=9 * GIB), contained=True), "note")
    assert any("9GiB are in use, and no record explains them" in text for text in notes)
    assert any("this is a container" in text for text in notes)
    world.engine("chat").hold(10, 0, 0)
    notes = texts(found(Nvml(used=9 * GIB), contained=True), "note")
    assert not any("explains" in text for text in notes)


def test_exclusive_and_prohibited_modes_are_wrong(found):
    assert texts(found(Nvml(mode=0)), "wrong") == []
    (text,) = texts(found(Nvml(mode=3)), "wrong")
    assert "Exclusive_Process" in text
    assert len(texts(found(Nvml(mode=2)), "wrong")) == 1


def test_mig_is_told(found):
    assert any("MIG is on" in text for text in texts(found(Nvml(mig=1)), "note"))
    assert not any("MIG is on" in text for text in texts(found(Nvml(mig=0)), "note"))


def test_mps_is_told_and_its_own_cap_is_wrong(found, tmp_path):
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "control").touch()
    at = str(tmp_path / "mps")
    assert any("MPS is on" in t for t in texts(found(Nvml(), CUDA_MPS_PIPE_DIRECTORY=at), "note"))
    capped = found(Nvml(), CUDA_MPS_PIPE_DIRECTORY=at, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=4G")
    assert len(texts(capped, "wrong")) == 1


def test_ledgers_of_another_user_are_told(found, tmp_path, monkeypatch):
    (tmp_path / "shm" / "kvtide-7").mkdir(parents=True)
    assert not any("ledgers of their own" in t for t in texts(found(None), "note"))
    import os

    mine = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: mine + 1)
    assert any("ledgers of their own" in t for t in texts(found(None), "note"))


def test_nvml_that_does_not_answer_is_a_note(found):
    class Broken(Nvml):
        def nvmlInit(self):  # noqa: N802
            raise RuntimeError("Driver Not Loaded")

    assert any("Driver Not Loaded" in text for text in texts(found(Broken()), "note"))


def test_foreign_files_leftovers_and_an_open_token(world):
    directory = world.directory
    world.engine("chat")
    assert {f.status for f in check_ledgers(directory)} == {"ok"}
    (directory / "notes.txt").touch()
    (directory / "serve.token").touch(mode=0o644)
    (directory / f"{UUID}.7.2b.wake").touch()
    dead = Tally(world.ledger.path, Owner("rank", 200, 1))
    findings = list(check_ledgers(directory))
    notes, wrongs = texts(findings, "note"), texts(findings, "wrong")
    assert any("notes.txt is not kvtide's" in text for text in notes)
    assert f"left by engines that were killed: {UUID}.200.1.rank.tally, {UUID}.7.2b.wake" in notes
    assert [text for text in wrongs if "serve.token" in text and "0644" in text] == wrongs
    dead.close()


def test_layout_quarantine_and_clock(world):
    chat = world.engine("chat")
    chat.rank_tally.close()
    tally = Tally(world.ledger.path, Owner.of_key("rank", chat.account.key), "block-major")
    chat.account.publish(PoolFigures(0, 0, 0, 0, 0, quarantined_bytes=4 * MIB))
    world.ledger.file.words[8] = 1 << 62  # the last sample's time
    findings = list(check_ledgers(world.directory))
    assert "'chat' lays its KV cache out block-major" in texts(findings, "ok")
    assert any("4MiB that its device did not take back" in t for t in texts(findings, "wrong"))
    assert any("from the future" in text for text in texts(findings, "note"))
    tally.close()
