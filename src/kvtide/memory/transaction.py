"""Changes of several steps that happen whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

__all__ = ["Transaction"]


class Transaction:
    """An undo stack: register how to undo a step right after the step.

    Leaving the `with` block without `commit` undoes all steps, newest first, whether it was left
    by an exception or by a plain return. An undo that raises does not keep the older ones from
    running; the first such exception is raised when all have run.

    Examples
    --------
    >>> log = []
    >>> with Transaction() as change:
    ...     change.undo_by(log.append, "first")
    ...     change.undo_by(log.append, "second")
    >>> log
    ['second', 'first']
    """

    def __init__(self) -> None:
        self._undos: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def __enter__(self) -> Transaction:
        return self

    def undo_by(self, undo: Callable[..., object], *arguments: object) -> None:
        """Register the undo of the step that was just done."""
        self._undos.append((undo, arguments))

    def commit(self) -> None:
        """Keep all steps so far."""
        self._undos.clear()

    def rollback(self) -> None:
        """Undo all steps that were not committed, newest first."""
        first: BaseException | None = None
        while self._undos:
            undo, arguments = self._undos.pop()
            try:
                undo(*arguments)
            except Exception as error:  # noqa: BLE001  # the older steps must be undone still
                first = first or error
        if first is not None:
            raise first

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.rollback()
