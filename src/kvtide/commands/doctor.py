"""`kvtide doctor`: what this machine has, what is wrong with it, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvtide.observe.findings import Report

__all__ = ["register"]

_MARKS = {"ok": "ok    ", "note": "note  ", "wrong": "WRONG "}


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("doctor")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Check settings, engines, devices and ledgers; exit 1 if something is wrong."""
    import msgspec

    from kvtide.observe.doctor import examine

    report = examine()
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(1)


def _print(report: Report) -> None:
    width = max(len(setting.variable) for setting in report.settings)
    typer.echo("settings")
    for setting in report.settings:
        source = "" if setting.source == "default" else f"  [{setting.source}]"
        typer.echo(f"  {setting.variable:{width}}  {setting.value}{source}")
    typer.echo("checks")
    for finding in report.findings:
        typer.echo(f"  {_MARKS[finding.status]}{finding.about}: {finding.found}")
        if finding.advice is not None:
            typer.echo(f"        {finding.advice}")
