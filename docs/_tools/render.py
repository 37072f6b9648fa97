"""Tutorials (percent-format .py) to pages, notebooks and figures; callable without mkdocs.

    python -m docs._tools.render --out build/pages            # all tutorials as Markdown with figures and notebooks
    python -m docs._tools.render --out build/pages 01 07      # some of them
    python -m docs._tools.render --times                      # only execute, print the seconds of each

A tutorial is executed cell by cell in a fresh Jupyter kernel (nbclient); a cell that raises fails the rendering. What
it printed and drew is kept in `.cache/tutorials`, under a key made of the tutorial, every source file and asset of the
packages, the recorded results and the versions of what is installed: nothing else can change what a page shows.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from docs._tools import results

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "tutorials"
CACHE = ROOT / ".cache" / "tutorials"

CELL_SECONDS = 120
"""Longest that one cell may take before the rendering fails."""

KEPT = 2
"""Cache entries that are kept per tutorial; older ones are removed."""

_PACKAGES = (
    "torch", "numpy", "matplotlib", "highspy", "networkx", "numba", "safetensors", "transformers",
    "nvidia-cutlass-dsl", "jupytext", "nbclient", "ipykernel",
)  # fmt: skip

_SETUP = f"""
import matplotlib
import matplotlib_inline.backend_inline
matplotlib.use("module://matplotlib_inline.backend_inline")  # whatever MPLBACKEND says
matplotlib_inline.backend_inline.set_matplotlib_formats("png")
matplotlib.rc_file({str(Path(__file__).with_name("matplotlibrc"))!r})
"""
"""Runs before the first cell and leaves no trace in the page."""


class TutorialFailed(RuntimeError):
    """A cell raised; the message holds tutorial, cell and error."""


@dataclass(frozen=True)
class Page:
    """A rendered tutorial.

    Attributes:
        name: file name without suffix, such as "01_moe_in_fifty_lines".
        title: its first heading.
        markdown: the page, with links to `<name>_files/...` beside it.
        files: further files by name relative to the page: figures, the notebook, the script.
        seconds: how long the cells ran when they were executed.
    """

    name: str
    title: str
    markdown: str
    files: dict[str, bytes]
    seconds: float


def tutorials() -> list[Path]:
    """All tutorials in order of their numbers."""
    return sorted(TUTORIALS.glob("[0-9][0-9]_*.py"))


@cache
def _environment_digest() -> str:
    """Hash of everything beside the tutorial that can change its output."""
    digest = hashlib.sha256()
    for package in ("moe_ref", "moe_fast"):
        for path in sorted((ROOT / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    for path in [*sorted(results.RESULTS.glob("*.json")), Path(__file__), _rc()]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    versions = {"python": sys.version.split()[0], **{name: _version(name) for name in _PACKAGES}}
    digest.update(json.dumps(versions, sort_keys=True).encode())
    return digest.hexdigest()


def _rc() -> Path:
    return Path(__file__).with_name("matplotlibrc")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _key(path: Path) -> str:
    return hashlib.sha256(path.read_bytes() + _environment_digest().encode()).hexdigest()[:24]


def run(path: Path):
    """Execute a tutorial in a fresh kernel; returns (executed notebook, seconds).

    Raises:
        TutorialFailed: a cell raised or took too long.
    """
    import jupytext
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    notebook = nbformat.from_dict(nbformat.v4.upgrade(jupytext.read(path)))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(_SETUP))
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
        config=Config({"KernelManager": {"transport": "ipc"}}),
    )
    start = time.perf_counter()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT) + (os.pathsep + before if before else "")
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise TutorialFailed(f"{path.name}: {_ANSI.sub('', str(error))}") from error
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    del notebook.cells[0]
    return notebook, time.perf_counter() - start


def executed(path: Path):
    """Like `run`, from the cache where nothing has changed."""
    import nbformat

    folder = CACHE / path.stem
    kept = folder / f"{_key(path)}.ipynb"
    if not kept.exists():
        notebook, seconds = run(path)
        notebook.metadata["seconds"] = round(seconds, 2)
        folder.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        nbformat.write(notebook, partial)
        partial.replace(kept)
        for old in sorted(folder.glob("*.ipynb"), key=lambda p: p.stat().st_mtime)[:-KEPT]:
            old.unlink()
    notebook = nbformat.read(kept, as_version=4)
    return notebook, float(notebook.metadata["seconds"])


# --- cells to Markdown ---------------------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FIGURE = re.compile(r"^# figure: (.+)$", re.MULTILINE)


def _fence(text: str, language: str, title: str = "") -> str:
    ticks = "`" * max(3, 1 + max((len(m) for m in re.findall(r"`+", text)), default=0))
    return f"{ticks}{language}{title}\n{text.rstrip()}\n{ticks}\n"


def _outputs(cell, prefix: str, caption: str) -> tuple[list[str], dict[str, bytes]]:
    """Markdown blocks and files of what a code cell printed and drew."""
    blocks: list[str] = []
    files: dict[str, bytes] = {}
    text = ""

    def flush() -> None:
        nonlocal text
        if text.strip():
            blocks.append(_fence(_ANSI.sub("", text), "{ .text .output }"))
        text = ""

    for output in cell.outputs:
        if output.output_type == "stream":
            # Progress and notes of the library go to stderr; a warning is worth a reader's attention.
            if output.name == "stdout" or "Warning" in output.text:
                text += output.text
            continue
        data = output.data
        if "image/png" in data:
            flush()
            name = f"{prefix}_{len(files) + 1}.png"
            files[name] = base64.b64decode(data["image/png"])
            blocks.append(
                f'<figure markdown="span">\n  ![{caption.replace("]", "").replace("[", "")}]({name})\n'
                + (f"  <figcaption>{caption}</figcaption>\n" if caption else "")
                + "</figure>\n"
            )
        elif "text/html" in data and "text/plain" not in data:
            flush()
            blocks.append(data["text/html"] + "\n")
        elif "text/plain" in data:
            text += data["text/plain"] + "\n"
    flush()
    return blocks, files


def to_page(path: Path, notebook, seconds: float) -> Page:
    """Markdown of an executed tutorial."""
    blocks: list[str] = []
    files: dict[str, bytes] = {}
    title = path.stem
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            blocks.append(cell.source + "\n")
            continue
        caption = _FIGURE.search(cell.source)
        source = _FIGURE.sub("", cell.source).strip("\n")
        if source:
            blocks.append(_fence(source, "python"))
        shown, drawn = _outputs(cell, f"{path.stem}_files/cell_{number:02d}", caption.group(1) if caption else "")
        blocks += shown
        files |= drawn
    markdown = "\n".join(blocks)
    heading = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    if heading:
        title = heading.group(1)
        facts = _facts(path, seconds)
        markdown = markdown[: heading.end()] + f"\n\n{facts}\n" + markdown[heading.end() :]
    files[f"{path.stem}.ipynb"] = plain_notebook(path)
    files[f"{path.stem}.py"] = path.read_bytes()
    return Page(path.stem, title, markdown, files, seconds)


def _facts(path: Path, seconds: float) -> str:
    """Line under the title: versions, running time, downloads."""
    made = f"moe-ref {_version('moe-ref')}, torch {_version('torch')}, Python {sys.version.split()[0]}"
    return (
        f'<p class="facts" markdown>Ran in {seconds:.0f} s when this page was built ({made}). '
        f"[Notebook]({path.stem}.ipynb){{ download }} · [Script]({path.stem}.py){{ download }}, "
        f"`python tutorials/{path.name}`</p>"
    )


# --- the notebook to download --------------------------------------------------------------------------------------

_ADMONITION = re.compile(r'^(!!!|\?\?\?\+?) (\w+)(?: "([^"]*)")?$')
_REFERENCE = re.compile(r"\[([^\]]+)\]\[[^\]]*\]")
_PAGE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]+\)")


def _for_jupyter(source: str) -> str:
    """Markdown of the site as Jupyter shows it: boxes become quotations, folded answers <details>."""
    lines, out, i = source.split("\n"), [], 0
    while i < len(lines):
        match = _ADMONITION.match(lines[i])
        if match is None:
            out.append(lines[i])
            i += 1
            continue
        body = []
        i += 1
        while i < len(lines) and (lines[i].startswith("    ") or not lines[i].strip()):
            body.append(lines[i][4:])
            i += 1
        text = "\n".join(body).strip()
        heading = match.group(3) or match.group(2).capitalize()
        if match.group(1) == "!!!":
            out += [f"> **{heading}**", ">", *(f"> {line}" for line in text.split("\n")), ""]
        else:
            out += [f"<details><summary>{heading}</summary>", "", text, "", "</details>", ""]
    return _PAGE_LINK.sub(r"\1", _REFERENCE.sub(r"\1", "\n".join(out)))


def plain_notebook(path: Path) -> bytes:
    """The tutorial as a notebook without outputs."""
    import jupytext
    import nbformat

    notebook = nbformat.from_dict(nbformat.v4.upgrade(jupytext.read(path)))
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
        if cell.cell_type == "markdown":
            cell.source = _for_jupyter(results.fill(cell.source))
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.writes(notebook, version=4).encode()


def render(path: Path) -> Page:
    """Execute (or take from the cache) and convert one tutorial."""
    notebook, seconds = executed(path)
    return to_page(path, notebook, seconds)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs._tools.render", description="Render tutorials to Markdown.")
    parser.add_argument("which", nargs="*", help="numbers or names; all by default")
    parser.add_argument("--out", type=Path, help="folder for pages; without it tutorials are only executed")
    parser.add_argument("--times", action="store_true", help="execute anew, whatever the cache holds")
    arguments = parser.parse_args(argv)
    chosen = [p for p in tutorials() if not arguments.which or any(p.stem.startswith(w) for w in arguments.which)]
    if not chosen:
        parser.error(f"no tutorial matches {arguments.which}; there are {[p.stem for p in tutorials()]}")
    total = 0.0
    for path in chosen:
        if arguments.times:
            shutil.rmtree(CACHE / path.stem, ignore_errors=True)
        try:
            page = render(path)
        except TutorialFailed as error:
            print(error, file=sys.stderr)
            return 1
        total += page.seconds
        print(f"{page.seconds:6.1f} s  {page.name}", flush=True)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{page.name}.md").write_text(page.markdown)
            for name, content in page.files.items():
                target = arguments.out / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
    print(f"{total:6.1f} s  in all")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
