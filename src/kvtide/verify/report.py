"""The report of a matrix, in Markdown and as one HTML page that needs nothing else."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import msgspec

from kvtide.verify.matrix import CaseResult, CheckResult, Setup, Verdict

__all__ = ["REPORT", "to_html", "to_markdown", "write_report"]

REPORT = "verify.json"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; width: 100%; }
td, th { border-bottom: 1px solid #ddd; padding: 0.2rem 0.6rem; text-align: left; }
td { vertical-align: top; }
.held { color: #287233; } .FAILED, .failed, .broken { color: #b00020; font-weight: bold; }
.skipped { color: #777; } pre { background: #f6f6f6; overflow-x: auto; padding: 0.6rem; }
"""


def write_report(verdict: Verdict, out: Path) -> list[Path]:
    """Write `verify.json`, `verify.md` and `verify.html` into a directory; their paths."""
    out.mkdir(parents=True, exist_ok=True)
    written = {
        REPORT: msgspec.json.format(msgspec.json.encode(verdict), indent=2).decode() + "\n",
        "verify.md": to_markdown(verdict),
        "verify.html": to_html(verdict),
    }
    for name, text in written.items():
        (out / name).write_text(text)
    return [out / name for name in written]


def _facts(setup: Setup, verdict: Verdict) -> list[tuple[str, str]]:
    return [
        ("engine", setup.engine_version),
        ("kvtide", setup.kvtide_version),
        ("device", f"{setup.backend}, tensor parallel {setup.tp}"),
        ("machine", setup.machine),
        ("Python", setup.python),
        ("models", ", ".join(setup.models)),
        *([("flags", shlex.join(setup.flags))] if setup.flags else []),
        ("started", setup.started),
        ("took", _minutes(verdict.seconds)),
    ]


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} minutes"


def _cases(count: int) -> str:
    return "1 case" if count == 1 else f"{count} cases"


def _summary(verdict: Verdict) -> str:
    checks = [check for case in verdict.cases for check in case.checks]
    held = sum(check.held for check in checks)
    states = [case.state for case in verdict.cases]
    skipped, missing = states.count("skipped"), states.count("not run")
    word = "Every check held" if verdict.ok else "Not every check held"
    if missing and held == len(checks):
        word = "Not finished"
    elif skipped == len(states):
        word = "Nothing was checked"
    text = f"{word}: {held} of {len(checks)} checks in {_cases(len(states) - skipped - missing)}; "
    text += f"{_cases(skipped)} skipped"
    return text + (f", {missing} not run yet." if missing else ".")


def _failed(case: CaseResult) -> list[CheckResult]:
    return [check for check in case.checks if not check.held]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _rows(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(titles)} |", f"| {' | '.join('---' for _ in titles)} |"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return [*lines, ""]


def to_markdown(verdict: Verdict) -> str:
    """The report as Markdown."""
    setup = verdict.setup
    lines = [f"# kvtide verify: {setup.engine} on {setup.backend}", "", _summary(verdict), ""]
    lines += _rows(("set-up", ""), _facts(setup, verdict))
    lines += ["## Cases", ""]
    lines += _rows(("case", "state", "checks", "seconds"), map(_case_row, verdict.cases))
    for case in verdict.cases:
        lines += [f"## {case.name}", ""]
        if case.reason:
            lines += [f"{case.state}: {case.reason}", ""]
        if case.checks:
            lines += _rows(("", "check", "of", "found"), map(_check_row, case.checks))
        for name, tail in case.logs.items():
            lines += [f"The end of {name}:", "", "```", tail, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _case_row(case: CaseResult) -> tuple[str, ...]:
    held = f"{len(case.checks) - len(_failed(case))} of {len(case.checks)}" if case.checks else ""
    return case.name, case.state, held, f"{case.seconds:.0f}"


def _check_row(check: CheckResult) -> tuple[str, ...]:
    return "held" if check.held else "FAILED", check.name, check.of, check.found


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = []
    for row in rows:
        cells = "".join(
            f'<td class="{cell}">{escape(cell)}</td>'
            if cell in ("held", "FAILED", "failed", "broken", "skipped")
            else f"<td>{escape(cell)}</td>"
            for cell in row
        )
        body.append(f"<tr>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"


def to_html(verdict: Verdict) -> str:
    """The report as one page."""
    setup = verdict.setup
    title = escape(f"kvtide verify: {setup.engine} on {setup.backend}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(_summary(verdict))}</p>",
        _table(("set-up", ""), _facts(setup, verdict)),
        "<h2>Cases</h2>",
        _table(("case", "state", "checks", "seconds"), map(_case_row, verdict.cases)),
    ]
    for case in verdict.cases:
        parts.append(f"<h2>{escape(case.name)}</h2>")
        if case.reason:
            parts.append(f"<p class={case.state}>{escape(f'{case.state}: {case.reason}')}</p>")
        if case.checks:
            parts.append(_table(("", "check", "of", "found"), map(_check_row, case.checks)))
        for name, tail in case.logs.items():
            parts.append(f"<p>The end of {escape(name)}:</p><pre>{escape(tail)}</pre>")
    return "\n".join(parts) + "</html>\n"
