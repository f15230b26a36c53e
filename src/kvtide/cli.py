"""The command line: builds the application, and turns every kvtide error into one clear line."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

import typer

from kvtide.commands import (
    bench,
    census,
    demo,
    doctor,
    plan,
    record,
    run,
    serve,
    status,
    steer,
    top,
    verify,
)
from kvtide.errors import KvtideError

__all__ = ["build", "main"]

_OUTPUT_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def build() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        help="Elastic KV-cache memory for LLM engines that share a GPU.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for command in (
        *(run, status, top, steer, serve, record, plan, census, bench, doctor, demo, verify),
    ):
        command.register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from kvtide import __version__

        typer.echo(f"kvtide {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", is_eager=True, callback=_show_version
    ),
) -> None:
    """Options of every command."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0, 1 for what went wrong, 2 for what cannot be understood."""
    try:
        build()(args=arguments, prog_name="kvtide")
    except KvtideError as error:
        print(f"kvtide: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except OSError as error:
        if error.errno not in _OUTPUT_LOST:
            raise
        print(f"kvtide: the output cannot be written: {error.strerror}", file=sys.stderr)
        # What is still buffered cannot go anywhere either: no second error at the very end.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
        sys.exit(1)
