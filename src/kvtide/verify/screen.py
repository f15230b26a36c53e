"""What a person sees while servers share memory: the steps, and who holds what right now."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvtide.units import format_size
from kvtide.verify.sampling import MemorySampler

__all__ = ["Screen"]

_WIDTH: Final = 48
_STYLES: Final = ("blue", "yellow", "green", "magenta")
_REFRESHES: Final = 8  # a second


class Screen:
    """Steps as they pass, with a bar of the device's memory below them on a terminal.

    Without a terminal each step is a line.
    """

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        self._names = names
        self._steps: list[str] = []
        self._done = 0
        self._total = 0
        self.sampler: MemorySampler | None = None
        self._live = Live(
            get_renderable=self._draw,
            console=console,
            refresh_per_second=_REFRESHES,
            transient=True,
        )

    def step(self, title: str, total: int = 0) -> None:
        """Begin a step of so many requests; the one before is done."""
        if self._steps:
            self._console.print(f"  [green]done[/]  {self._steps[-1]}")
        self._steps.append(title)
        self._done, self._total = 0, total
        if not self._console.is_terminal:
            self._console.print(f"        {title} ...")

    def advance(self) -> None:
        """One request of the step has ended. From any thread."""
        self._done += 1

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        if self._steps:
            word = "[green]done[/]" if error is None else "[red]ended[/]"
            self._console.print(f"  {word}  {self._steps[-1]}")

    def _draw(self) -> Group:
        step = self._steps[-1] if self._steps else ""
        count = f"  {self._done} of {self._total} requests" if self._total else ""
        lines = [Text.from_markup(f"  [bold]now[/]   {step}{count}")]
        sampler = self.sampler
        if sampler is not None and sampler.samples:
            sample = sampler.samples[-1]
            lines += _bar(sample.budget_bytes, sample.charged_bytes, self._names)
        return Group(*lines)


def _bar(budget_bytes: int, charged_bytes: dict[str, int], names: Sequence[str]) -> list[Text]:
    scale = max(budget_bytes, sum(charged_bytes.values()), 1)
    bar, legend = Text("        "), Text("        ")
    used = 0
    for name, style in zip(names, _STYLES, strict=False):
        size_bytes = charged_bytes.get(name, 0)
        width = round(_WIDTH * size_bytes / scale)
        bar.append("█" * width, style)
        used += width
        legend.append(f"{name} {format_size(size_bytes)}   ", style)
    bar.append("·" * max(0, _WIDTH - used), "dim")
    legend.append(f"of {format_size(budget_bytes)}", "dim")
    return [bar, legend]
