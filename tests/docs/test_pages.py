"""What the hand-written pages tell people to type: options exist, commands for a laptop work, Python examples run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from docs_support import ROOT

from moe_ref import cli

DOCS = ROOT / "docs"
PAGES = sorted(p for p in DOCS.rglob("*.md") if not {"_tools", "assets", "results"} & set(p.relative_to(DOCS).parts))
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def _blocks(page: Path, language: str) -> list[str]:
    """Code blocks of a page, indentation removed."""
    out = []
    for indent, found, body in FENCE.findall(page.read_text()):
        if found == language:
            out.append("\n".join(line.removeprefix(indent) for line in body.splitlines()))
    return out


def _commands(page: Path) -> list[list[str]]:
    """Arguments of every `moe-ref` command of a page."""
    lines = [line for block in _blocks(page, "text") for line in block.splitlines()]
    lines += re.findall(r"`(moe-ref [a-z][^`]*)`", page.read_text())
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("moe-ref ")]


def test_links_lead_somewhere_in_the_checkout_too() -> None:
    """Pages are read on disk and on code hosting sites, where nothing is made of tutorials and results."""
    seen = 0
    for page in [*PAGES, *(DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]:
        for address in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in address:
                seen += 1
                assert (page.parent / address).exists(), f"{page.relative_to(DOCS.parent)}: {address}"
    assert seen > 40


def test_options_in_the_pages_exist() -> None:
    known = typer.main.get_command(cli.build_app()).commands  # pyright: ignore[reportAttributeAccessIssue]
    seen = 0
    for page in PAGES:
        for name, *arguments in _commands(page):
            if name == "bench":
                continue
            assert name in known, f"{page.name}: moe-ref {name}"
            options = {option for parameter in known[name].params for option in parameter.opts}
            for argument in arguments:
                if argument.startswith("--"):
                    assert argument in options | {"--help", "--debug"}, f"{page.name}: moe-ref {name} {argument}"
                    seen += 1
    assert seen > 40


FIRST = [c for c in _commands(DOCS / "start" / "first-experiment.md") if len(c) > 1]


@pytest.mark.parametrize("arguments", FIRST, ids=" ".join)
def test_the_first_experiment_works(arguments: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip()


EXAMPLES = [("start/quickstart.md", "expert_load"), ("start/first-experiment.md", "schedule("),
            ("start/first-experiment.md", "compare("),
            ("howto/own-loads.md", "split_evenly")]  # fmt: skip


@pytest.mark.parametrize(("name", "speaks_of"), EXAMPLES)
def test_python_examples_run(name: str, speaks_of: str, capsys) -> None:
    blocks = [block for block in _blocks(DOCS / name, "python") if speaks_of in block]
    assert len(blocks) == 1
    exec(compile(blocks[0], name, "exec"), {})
    assert capsys.readouterr().out.strip()
