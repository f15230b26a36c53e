"""Each row of docs/failure-modes.md names a test that exists, and SECURITY.md files that do."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "failure-modes.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def rows() -> list[str]:
    lines = PAGE.read_text().splitlines()
    table = [line for line in lines if line.startswith("|")]
    return [r for r in table if not r.startswith(("| what goes wrong", "| ---"))]


def test_there_is_a_row_for_every_kind_of_surroundings():
    text = PAGE.read_text()
    assert len(rows()) >= 40
    for what in ("cut", "bits flip", "zeroed", "later version", "removed", "link", "another user"):
        assert what in text, what


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip()[:50])
def test_each_row_names_what_is_seen_and_done_and_a_test_that_exists(row):
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert len(cells) == 5, f"{len(cells)} cells"
    assert all(cells)
    named = _TEST.findall(cells[4])
    assert len(named) == 1, cells[4]
    path, name = named[0]
    tree = ast.parse((ROOT / path).read_text())
    names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    assert not name or name in names, f"{path} has no {name}"


def test_the_page_on_security_names_files_that_exist():
    text = (ROOT / "SECURITY.md").read_text()
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert (ROOT / "tests" / "faults" / name).exists(), name
