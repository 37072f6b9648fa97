"""Renderer, placeholders, docstrings, and the data behind the pages."""

from __future__ import annotations

import json
import re

import pytest
from docs_support import ROOT, needs_docs
from scaling_rows import a_run

from docs._tools import api, render, results, scaling, trouble
from moe_fast.bench.scaling import figures


@pytest.fixture
def recorded(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """A folder with one result."""
    values = dict.fromkeys(results.PROVENANCE_KEYS, "x") | {
        "packages": {"torch": "1", "gone": None},
        "commit": "0123456789abcdef-dirty",
        "date": "2026-01-02T03:04:05Z",
        "rows": [{"zipf": 0.5, "a": {"mean": 1.25}}, {"zipf": 1.0, "a": {"mean": 2000.5}}],
        "solvers": {"flow": {"us": 3, "exact": True}, "lp": {"us": 12345, "exact": False}},
    }
    (tmp_path / "one.json").write_text(json.dumps(values))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return values


def test_placeholders_become_what_the_file_says(recorded) -> None:
    assert results.fill("{{ value one rows.zipf=0.5.a.mean .1f }}") == "1.2"
    assert results.fill("{{ value one rows.1.a.mean }} and {{ value one solvers.lp.us }}") == "2,000 and 12,345"
    table = results.fill("{{ table one rows zipf,a.mean }}")
    assert table.splitlines() == ["| zipf | a |", "|---:|---:|", "| 0.5 | 1.25 |", "| 1 | 2,000 |"]
    assert "| flow | 3 | yes |" in results.fill("{{ table one solvers }}")
    named = results.table([{"layer": "paper-e8", "idea": "a well-known one", "size": "-3"}])
    assert named.splitlines()[-1] == '| <span class="name">paper-e8</span> | a well-known one | -3 |'
    provenance = results.fill("{{ provenance one }}")
    assert "`0123456789ab-dirty`" in provenance
    assert "torch 1." in provenance
    assert "gone" not in provenance


def test_a_changed_result_changes_the_page(recorded) -> None:
    before = results.page("one")
    recorded["solvers"]["flow"]["us"] = 4
    (results.RESULTS / "one.json").write_text(json.dumps(recorded))
    after = results.page("one")
    assert "| flow | 3 | yes |" in before
    assert "| flow | 4 | yes |" in after


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ value two rows }}", "no result 'two'"),
        ("{{ value one solvers.simplex.us }}", "nothing at 'simplex'"),
        ("{{ value one rows.zipf=3.a }}", "nothing at 'zipf=3'"),
        ("{{ table one }}", "lacks a path"),
    ],
)
def test_missing_results_are_errors(recorded, text: str, message: str) -> None:
    with pytest.raises(results.ResultMissing, match=re.escape(message)):
        results.fill(text)


def test_a_result_without_provenance_is_refused(recorded) -> None:
    del recorded["command"]
    (results.RESULTS / "one.json").write_text(json.dumps(recorded))
    with pytest.raises(results.ResultMissing, match="command"):
        results.load("one")


def test_the_scaling_page_says_what_was_not_measured(recorded) -> None:
    """Without a run the commands that make one, of the papers' figures only theirs; with all of them no such word."""
    missing = scaling.part("missing")
    assert "No machine with 4 or 8 GPUs" in missing
    assert "the tables are empty" in missing
    for gpus in (2, 4, 8):
        command = f"--nproc-per-node {gpus} -m moe_fast.bench scaling --out docs/results/scaling_{gpus}gpu.json"
        assert command in missing
    assert "| FlashMoE | million tokens a second | 17.7 | \N{EN DASH} |" in scaling.part("papers")
    assert {scaling.part(figure) for figure in figures.FIGURES} == {"Not measured yet.\n"}
    assert (scaling.drawing(), scaling.part("figure")) == ({}, "")
    for gpus in (2, 8):
        (results.RESULTS / f"scaling_{gpus}gpu.json").write_text(json.dumps(a_run(gpus)))
    missing = scaling.part("missing")
    assert "No machine with 4 GPUs could be had yet, so the tables below have nothing from there" in missing
    assert "from 2 and 8 GPUs" in missing
    assert "nproc-per-node 8" not in missing
    assert "| FlashMoE | million tokens a second | 17.7 | 121.36 |" in scaling.part("papers")
    assert "| 1.25 | yes |" in scaling.part("aims")
    assert "| GPUs | skew |" in scaling.part("balance")
    (results.RESULTS / "scaling_4gpu.json").write_text(json.dumps({**a_run(4, figures=("wire",)), "cells": 57}))
    assert scaling.part("missing") == "The run on 4 GPUs lacks 50 of its 57 cells.\n"
    assert results.page("scaling_8gpu").startswith("# t\n")
    assert scaling.drawing()[scaling.FIGURE].startswith(b"<?xml")
    assert "](scaling.svg)" in scaling.part("figure")
    with pytest.raises(results.ResultMissing, match="no part 'speeds'"):
        scaling.part("speeds")


def test_the_scaling_page_shows_every_part() -> None:
    """A part that the page does not ask for is seen by nobody."""
    text = (ROOT / "docs/recorded/scaling.md").read_text()
    parts = [*scaling.PARTS, *figures.FIGURES]
    assert sorted(re.findall(r"^\{\{ scaling (\w+) \}\}$", text, re.MULTILINE)) == sorted(parts)
    assert "None" not in "".join(map(scaling.part, parts))


@pytest.mark.parametrize("name", results.names())
def test_every_recorded_result_has_a_page(name: str) -> None:
    page = results.page(name)
    values = results.load(name)
    assert str(values["command"]) in page.replace("\n    ", "\n")
    assert not re.search(r"/(root|home|Users|work|tmp|mnt|workspace)\b", json.dumps(values)), "a path of one machine"
    assert "None" not in page


@needs_docs
@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("rows: rows[e][j] of replica j", "rows: `rows[e][j]` of replica j"),
        ("[side][source], set by", "`[side][source]`, set by"),
        ("`a[i][j]` stays, [E, D] stays", "`a[i][j]` stays, [E, D] stays"),
        (">>> a[0][1]", ">>> a[0][1]"),
    ],
)
def test_indices_are_no_references(text: str, quoted: str) -> None:
    from docs._tools import docstrings

    assert docstrings.quoted(text) == quoted


def test_every_public_module_is_in_the_api() -> None:
    listed = {module for _, _, modules in api.groups() for module in modules}
    for package in ("moe_ref", "moe_fast"):
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if any(part.startswith("_") for part in module.split(".")):
                continue
            assert module in listed, f"{module} has no place in docs/_tools/api.py"


def test_no_page_stands_twice_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = re.findall(r": ([\w/-]+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    assert len(pages) > 15
    assert len(pages) == len(set(pages)), sorted(page for page in set(pages) if pages.count(page) > 1)


def test_every_named_test_exists() -> None:
    assert len(trouble.ROWS) == 30
    for row in trouble.ROWS:
        assert row.tests, row.case
        for test in row.tests:
            path, _, name = test.partition("::")
            name, _, scenario = name.rstrip("]").partition("[")
            text = (ROOT / path).read_text()
            assert not path.startswith("tests/") or name, f"{path} as a whole tells nobody what to look at ({row.case})"
            assert not name or f"def {name}" in text, f"{test} is not there ({row.case})"
            assert f'"{scenario}"' in text if scenario else True, f"{test}: no such scenario ({row.case})"


def test_boxes_in_downloaded_notebooks() -> None:
    source = (
        'See [`x`][moe_ref.x].\n\n!!! note "Title"\n    Text.\n\n??? success "Answer"\n    Yes, [there](03_a.md).\n'
    )
    assert render._for_jupyter(source).split("\n") == [
        "See `x`.", "", "> **Title**", ">", "> Text.", "", "<details><summary>Answer</summary>", "", "Yes, there.", "",
        "</details>", "",
    ]  # fmt: skip


@needs_docs
def test_a_failing_cell_names_itself(tmp_path) -> None:
    path = tmp_path / "99_planted.py"
    path.write_text("# %%\nprint('before')\n\n# %%\nassert 1 == 2, 'planted'\n")
    with pytest.raises(render.TutorialFailed, match=r"(?s)99_planted.py.*planted"):
        render.run(path)


@needs_docs
def test_cells_become_markdown(tmp_path) -> None:
    path = tmp_path / "98_small.py"
    path.write_text(
        "# %% [markdown]\n# # 98. Small\n#\n# Text.\n\n# %%\nprint('one')\n2 + 3\n\n# %%\n# figure: A line.\n"
        "import matplotlib.pyplot as plt\n\nplt.plot([0, 1])\nplt.show()\n"
    )
    page = render.to_page(path, *render.run(path))
    assert page.title == "98. Small"
    assert "```{ .text .output }\none\n5\n```" in page.markdown
    assert "![A line.](98_small_files/cell_02_1.png)" in page.markdown
    assert "# figure" not in page.markdown
    assert page.files["98_small_files/cell_02_1.png"].startswith(b"\x89PNG")
    notebook = json.loads(page.files["98_small.ipynb"])
    assert [cell["cell_type"] for cell in notebook["cells"]] == ["markdown", "code", "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    assert page.files["98_small.py"] == path.read_bytes()
