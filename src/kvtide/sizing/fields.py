"""Reading a model's `config.json`, so that what is missing or odd is named, never guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtide.sizing.errors import ConfigError

__all__ = ["RUN_DTYPES", "Fields", "read_json"]

# Of any figure of a model: what is more is a mistake, and would be calculated with for long.
_MOST = 1 << 40
RUN_DTYPES = ("float32", "bfloat16", "float16")


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises
    ------
    ConfigError
        The file cannot be read, or is not a JSON object.
    """
    try:
        # Published files have `Infinity` (a Mamba 2's time steps), which strict JSON has not.
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds {type(found).__name__}, not a JSON object")
    return found


class Fields:
    """One object of a configuration, with the file and the path that errors name.

    `defaults` are those of the model type's own configuration class, for fields that published
    files leave out; each one that was used is told in `assumed`. `told_dtype` is the dtype that
    the model runs in where somebody said so, whatever the file has.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        *,
        file: str,
        section: str = "",
        model_type: str = "",
        defaults: Mapping[str, Any] | None = None,
        told_dtype: str | None = None,
    ) -> None:
        self.data = dict(data)
        self.file = file
        self.section = section
        self.model_type = model_type
        self.defaults = defaults or {}
        self.told_dtype = told_dtype
        self.assumed: list[str] = []

    def has(self, name: str) -> bool:
        """Whether the file gives the field a value other than null."""
        return self.data.get(name) is not None

    def _named(self, name: str) -> str:
        return f"{self.section}.{name}" if self.section else name

    def _odd(self, name: str, wanted: str) -> ConfigError:
        return ConfigError(
            f"{self.file}: {self._named(name)} is {self.data[name]!r}, which is not {wanted}"
        )

    def missing(self, name: str, need: str) -> ConfigError:
        """The error for a field that is not there."""
        whose = f" of a {self.model_type} model" if self.model_type else ""
        return ConfigError(
            f"{self.file} has no {self._named(name)!r}: the plan{whose} needs it ({need})"
        )

    def get(self, name: str) -> Any:
        """The value, or the class's own default, or None."""
        if self.has(name):
            return self.data[name]
        if name in self.defaults:
            value = self.defaults[name]
            note = f"{name} is not in the file: {value}, the default of {self.model_type}"
            if note not in self.assumed:
                self.assumed.append(note)
            return value
        return None

    def derive(self, name: str, value: int) -> None:
        """Set a field that the model type's class computes from others."""
        self.data[name] = value

    def assume(self, name: str, value: int, source: str) -> None:
        """The same, where the reader should know: the file may simply be incomplete."""
        self.data[name] = value
        self.assumed.append(f"{name} is not in the file: {source}, as {self.model_type} has it")

    def integer(self, name: str, need: str, *, least: int = 1, most: int = _MOST) -> int:
        """A whole number; `need` tells the reader what it is for."""
        value = self.get(name)
        if value is None:
            raise self.missing(name, need)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._odd(name, f"a whole number of at least {least}")
        if value > most:
            raise self._odd(name, f"a whole number of at most {most}")
        return value

    def integer_or(self, name: str, fallback: int) -> int:
        """A whole number, or `fallback` where the model's own code falls back to it."""
        return fallback if self.get(name) is None else self.integer(name, "", least=0)

    def text(self, name: str, need: str, choices: Sequence[str]) -> str:
        """A string out of `choices`."""
        value = self.get(name)
        if value is None:
            raise self.missing(name, need)
        if value not in choices:
            raise self._odd(name, f"one of {', '.join(choices)}")
        return str(value)

    def run_dtype(self, need: str) -> str:
        """The dtype that engines run: as told, else the file's, but bfloat16 for float32."""
        if self.told_dtype is not None:
            return self.told_dtype
        name = "dtype" if self.has("dtype") else "torch_dtype"
        dtype = self.text(name, need, RUN_DTYPES)
        return "bfloat16" if dtype == "float32" else dtype

    def list_of(self, name: str, length: int) -> list[Any] | None:
        """A list of exactly `length` items, or None where the field is not there."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length:
            raise self._odd(name, f"a list of {length} items, one a layer")
        return value[:length]

    def one_by_one(self) -> dict[int, Fields]:
        """What single layers have otherwise, by their index, as transformers 5 writes it."""
        name = "per_layer_config"
        told = self.get(name) or {}
        if not isinstance(told, dict) or not all(
            index.isdecimal() and isinstance(of_layer, dict) for index, of_layer in told.items()
        ):
            raise self._odd(name, "an object of objects, one a layer by its number")
        return {
            int(index): Fields(
                of_layer,
                file=self.file,
                section=f"{self._named(name)}.{index}",
                model_type=self.model_type,
            )
            for index, of_layer in told.items()
        }
