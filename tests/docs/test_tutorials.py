"""Every tutorial keeps the template, is a plain script, runs, and passes its own checks.

A tutorial is executed once, by the renderer; the site is then built from what that left in the cache. That the script
is the same program is checked on its text: the cells hold plain Python, so nothing can differ.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time

import pytest
from docs_support import MISSING, ROOT

from docs._tools import render

TUTORIALS = render.tutorials()
NAMES = [path.stem for path in TUTORIALS]
PARTS = (
    "# **Question.**",
    "# **Time**",
    "**Needs**",
    '!!! question "Predict first"',
    "# ## Check",
    '!!! abstract "What the real kernel does instead"',
    "# ## Exercises",
    "# ## In the papers",
)
"""What every tutorial has."""

SECONDS = {"09": 90.0}
"""Longest that a tutorial may take on two idle cores; 40 s where nothing is said. Tests allow three times as much,
because they share the machine."""


def test_there_are_ten_with_consecutive_numbers() -> None:
    assert [name[:2] for name in NAMES] == [f"{n:02d}" for n in range(1, 11)]


def _cells(text: str) -> list[tuple[str, str]]:
    """(kind, source) of each cell of a percent-format file."""
    parts = re.split(r"^# %%(.*)$", text, flags=re.MULTILINE)[1:]
    return [
        ("text" if "[markdown]" in head else "code", body) for head, body in zip(parts[::2], parts[1::2], strict=True)
    ]


@pytest.mark.parametrize("path", TUTORIALS, ids=NAMES)
def test_keeps_the_template(path) -> None:
    text = path.read_text()
    cells = _cells(text)
    prose = "\n".join(source for kind, source in cells if kind == "text")
    for part in PARTS:
        assert part in prose, f"{path.name} lacks {part!r}"
    answers = prose.count('# ??? success "Answer"')
    assert 2 <= answers <= 3, f"{path.name} has {answers} folded answers"
    assert re.search(rf"^# # {int(path.stem[:2])}\. ", prose, re.MULTILINE), "the title starts with the number"
    code = [source.strip() for kind, source in cells if kind == "code"]
    for source in code:
        lines = [line for line in source.splitlines() if line.strip() and not line.startswith("# figure:")]
        assert len(lines) <= 20, f"{path.name}: a step of {len(lines)} lines:\n{source[:200]}"
    assert "# figure: " in text, "a plot with a caption"
    checks = code[-1]
    assert checks.count("assert ") >= 3, "the last cell is the check cell"
    assert 'print("all checks passed")' in checks


@pytest.mark.parametrize("path", TUTORIALS, ids=NAMES)
def test_is_plain_python(path) -> None:
    tree = ast.parse(path.read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith))]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"display", "get_ipython"}, "works in a notebook only"


def _run_script(path) -> float:
    """Run a tutorial as a script; returns the seconds that it took."""
    start = time.perf_counter()
    environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, path], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.rstrip().endswith("all checks passed")
    return time.perf_counter() - start


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=NAMES)
def test_runs_and_passes_its_checks(path) -> None:
    limit = 3 * SECONDS.get(path.stem[:2], 40.0)
    if MISSING:  # no notebook tools: the script will do
        assert _run_script(path) < limit
        return
    page = render.render(path)
    assert page.markdown.count("all checks passed\n```") == 1, "the check cell printed something else"
    assert "Traceback" not in page.markdown
    assert "Warning:" not in page.markdown
    assert any(name.endswith(".png") for name in page.files)
    assert page.seconds < limit, f"{path.stem} took {page.seconds:.0f} s"
    print(f"{path.stem}: {page.seconds:.1f} s")


@pytest.mark.slow
def test_the_first_runs_as_a_script_and_draws_soon() -> None:
    assert _run_script(TUTORIALS[0]) < 60
