"""API pages: one per package, with every public module of it; the text comes from the docstrings (mkdocstrings)."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

GROUPS = (
    ("Layer", "layer", "moe_ref", ("", "config", "gate", "layer", "stats", "experts", "parameters", "definition")),
    ("Data movement", "movement", "moe_ref", ("counts", "layout", "dispatch", "combine", "wire", "pipeline", "world")),
    ("Comparing backends", "comparing", "moe_ref", ("backends", "diff", "comparison", "cases")),
    ("Token scheduling", "balance", "moe_ref.balance", None),
    ("Placement", "placement", "moe_ref.placement", None),
    ("Actor runtime", "runtime", "moe_ref.runtime", None),
    ("Training", "train", "moe_ref.train", None),
    ("Hugging Face blocks", "compat", "moe_ref.compat", None),
    ("Everything else", "other", "moe_ref", None),
    ("moe_fast: the GPU side", "moe_fast", "moe_fast", None),
    ("moe_fast: the megakernel", "kernel", "moe_fast.kernel", None),
    ("moe_fast: the benchmark", "bench", "moe_fast.bench", None),
    ("moe_fast: scaling runs", "scaling", "moe_fast.bench.scaling", None),
    ("moe_fast: the ladder of kernels", "ladder", "moe_fast.ladder", None),
)
"""(title, file name, package, modules or None for all modules of the package that no other group names)."""


def _modules(package: str) -> list[str]:
    folder = ROOT / package.replace(".", "/")
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def _first_line(module: str) -> str:
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def _exports(package: str) -> str:
    """Sentence with a link for each name that a package takes from its modules."""
    links: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("moe_ref.", "moe_fast.")):
            names = [alias.name for alias in node.names if not alias.name.startswith("_")]
            links |= {f"[`{name}`][{node.module}.{name}]" for name in names}
    return f"Exports {', '.join(sorted(links))}." if links else ""


@cache
def groups() -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """(title, uri, full module names) of each page; every public module stands on one page."""
    named = {f"{package}.{m}" for _, _, package, modules in GROUPS for m in modules or ()}
    out = []
    for title, file, package, modules in GROUPS:
        if not (ROOT / package.replace(".", "/") / "__init__.py").exists():
            continue
        if modules is None:
            full = [f"{package}.{m}" for m in _modules(package) if f"{package}.{m}" not in named]
            if file != "other":
                full.insert(0, package)  # the package itself, with what it exports
        else:
            full = [f"{package}.{m}" if m else package for m in modules if not m or m in _modules(package)]
        if full:
            out.append((title, f"api/{file}.md", tuple(full)))
    return tuple(out)


def pages() -> list[tuple[str, str, str]]:
    """(title, uri, Markdown) of each page."""
    out = []
    for title, uri, modules in groups():
        parts = [f"# {title}", ""]
        for module in modules:
            parts += [f"::: {module}", ""]
            if (ROOT / module.replace(".", "/")).is_dir():
                # Its names are those of its modules, which stand on their own.
                parts[-1:] = ["    options:", "      members: false", "", _exports(module), ""]
        out.append((title, uri, "\n".join(parts)))
    return out


def index() -> str:
    """Page with every module and the first sentence of its docstring."""
    lines = [
        "# API reference",
        "",
        "Made from the docstrings of the source. Names that begin with an underscore are private and may change.",
        "",
    ]
    for title, uri, modules in groups():
        lines += [f"## {title}", "", "| module | what it is |", "|---|---|"]
        page = uri.removeprefix("api/")
        lines += [f"| [`{m}`]({page}#{m}) | {_first_line(m).replace('|', chr(92) + '|')} |" for m in modules]
        lines.append("")
    return "\n".join(lines)
