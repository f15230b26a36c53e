"""Every `KVTIDE_*` variable, read once and checked; each is the field of the same name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvtide.errors import SettingsError, UsageError
from kvtide.units import MIB, format_size, parse_size

__all__ = ["LAYOUTS", "LOG_FORMS", "Settings", "check_name"]

LAYOUTS = ("auto", "block-major", "per-layer")
LOG_FORMS = ("text", "json", "none")

_MAX_NAME_BYTES = 128
_MAX_PRIORITY = 1000
_NAME = re.compile(r"[^\s/\x00-\x1f\x7f]+")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def check_name(name: str) -> str:
    """Return an instance's name if it can be one.

    Raises
    ------
    UsageError
        It is empty, holds white space, slashes or control characters, or is too long.
    """
    if not _NAME.fullmatch(name) or name.startswith("-"):
        raise UsageError(
            f"{name!r} cannot name an instance: use letters, digits and punctuation other than "
            "'/', no white space, and no '-' at the start"
        )
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise UsageError(f"{name[:40]!r}... is longer than {_MAX_NAME_BYTES} bytes")
    return name


def _device_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(map(_DEVICE.fullmatch, names)):
        raise UsageError(
            "write a plain name: at most 64 letters, digits, '.', '_' and '-', the first a letter "
            "or digit; or several, with commas between them"
        )
    if len(set(names)) < len(names):
        raise UsageError("name each device once")
    return names


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise UsageError("write 1 for on or 0 for off")
    return text == "1"


def _seconds(text: str) -> float | None:
    if text == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        raise UsageError("write seconds, such as 30 or 2.5, or none") from None
    if not 0 <= value < 1e9:
        raise UsageError("seconds must be from 0 to 1e9")
    return value


def _priority(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d{1,4}", text, re.ASCII) or abs(int(text)) > _MAX_PRIORITY:
        raise UsageError(f"write a whole number from -{_MAX_PRIORITY} to {_MAX_PRIORITY}")
    return int(text)


def _size_or_none(text: str) -> int | None:
    return None if text == "none" else parse_size(text)


def _log_form(text: str) -> str:
    if text not in LOG_FORMS:
        raise UsageError(f"write one of {', '.join(LOG_FORMS)}")
    return text


def _layout(text: str) -> str:
    if text not in LAYOUTS:
        raise UsageError(f"write one of {', '.join(LAYOUTS)}")
    return text


def _default_dir() -> Path:
    return Path(f"/dev/shm/kvtide-{os.getuid()}")


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // (2 * MIB) * (2 * MIB)


def _setting(parse: Callable[[str], Any], default: Any, doc: str) -> Any:
    given = {"default_factory": default} if callable(default) else {"default": default}
    return field(metadata={"parse": parse, "doc": doc}, **given)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one process. Sizes in bytes, times in seconds.

    Field `x` is read from the variable `KVTIDE_X`, but for `enabled`, which is `KVTIDE` itself.
    """

    enabled: bool = _setting(_flag, False, "1 puts engines that start under kvtide")
    dir: Path = _setting(Path, _default_dir, "directory of the ledgers, private to one user")
    name: str | None = _setting(check_name, None, "name of this instance; default: engine-model")
    limit: int | None = _setting(_size_or_none, None, "ceiling of this instance on each device")
    min: int = _setting(
        parse_size, 0, "what this instance can always get back of each device; default: nothing"
    )
    priority: int = _setting(
        _priority, 0, "who gives way first: the lower number; from -1000 to 1000"
    )
    headroom: int = _setting(
        parse_size, 0, "bytes this instance wants left unclaimed on each device, by anybody"
    )
    margin: int | None = _setting(
        parse_size, None, "bytes of a device never lent; default: 1%, at least 512MiB; host: 0"
    )
    budget: int | None = _setting(
        _size_or_none, None, "cap on what a device lends to all instances"
    )
    host_memory: int = _setting(
        parse_size, _half_of_memory, "size of the host device; default: half of the memory"
    )
    host_device: tuple[str, ...] = _setting(
        _device_names,
        ("host",),
        "name of the host device; engines share memory under the same one. Of several, as in a,b, "
        "each rank takes one in turn",
    )
    wait_deadline: float | None = _setting(
        _seconds, None, "seconds an engine waits for memory before it gives up; default: for ever"
    )
    post_capture: bool = _setting(
        _flag, True, "on a GPU, 1 sizes by what is left once graphs are captured, 0 by vLLM's flag"
    )
    layout: str = _setting(
        _layout,
        "auto",
        "KV cache layout: block-major, per-layer, or auto for what the engine takes",
    )
    log: str = _setting(
        _log_form, "text", "how an engine logs its memory's events: text, json, or none"
    )

    @classmethod
    def variable(cls, field_name: str) -> str:
        """The environment variable that sets a field."""
        return "KVTIDE" if field_name == "enabled" else f"KVTIDE_{field_name.upper()}"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings.

        Variables of the form `KVTIDE_INTERNAL_*` are how the processes of one server hand each
        other what they found; they are not settings.

        Raises
        ------
        SettingsError
            A value is not accepted, two contradict each other, or a variable is unknown.
        """
        values: dict[str, Any] = {}
        known = set()
        for f in fields(cls):
            variable = cls.variable(f.name)
            known.add(variable)
            text = environ.get(variable)
            if text is None or text == "":
                continue
            try:
                values[f.name] = f.metadata["parse"](text)
            except UsageError as error:
                raise SettingsError(f"{variable}={text!r} is not accepted: {error}") from None
        for variable in sorted(environ):
            if variable.startswith("KVTIDE_") and variable not in known:
                if variable.startswith("KVTIDE_INTERNAL_"):
                    continue
                raise SettingsError(
                    f"{variable} is not a setting of kvtide; there are {', '.join(sorted(known))}"
                )
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        if not self.dir.is_absolute():
            raise SettingsError(f"KVTIDE_DIR={str(self.dir)!r} must be an absolute path")
        if self.budget is not None and self.limit is not None and self.limit > self.budget:
            raise SettingsError(
                f"KVTIDE_LIMIT={format_size(self.limit)} is above "
                f"KVTIDE_BUDGET={format_size(self.budget)}: lower the one or raise the other"
            )
        for variable, ceiling in (("KVTIDE_LIMIT", self.limit), ("KVTIDE_BUDGET", self.budget)):
            if ceiling is not None and self.min > ceiling:
                raise SettingsError(
                    f"KVTIDE_MIN={format_size(self.min)} is above "
                    f"{variable}={format_size(ceiling)}: lower the one or raise the other"
                )
