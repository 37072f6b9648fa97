"""Scaling runs as text: every figure, what was aimed at, the papers' figures.

A table's columns are the keys of its rows, those of inner objects with a dot.
"""

from __future__ import annotations

from typing import Any

from moe_fast.bench import prediction
from moe_fast.bench.scaling.aims import GPUS, aims, papers
from moe_fast.bench.scaling.figures import FIGURES, Result, Rows, missing


def flat(row: dict[str, Any], before: str = "") -> dict[str, Any]:
    """A row with the values of inner objects under dotted names, without "ms" and "median" in them."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            out |= flat(value, before if key == "ms" else f"{before}{key}.")
        else:
            out[before[:-1] if before and key == "median" else before + key] = value
    return out


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(_text(v) for v in value)
    return f"{value:g}" if isinstance(value, (int, float)) and abs(value) < 1e6 else str(value)


def table(rows: Rows) -> str:
    """Rows as aligned text."""
    lines = [flat(row) for row in rows]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    cells = [[name.replace("_", " ") for name in columns], *([_text(one.get(n)) for n in columns] for one in lines)]
    widths = [max(len(cell[i]) for cell in cells) for i in range(len(columns))]
    return "\n".join("  ".join(text.rjust(w) for text, w in zip(cell, widths, strict=True)).rstrip() for cell in cells)


def render(results: list[Result]) -> str:
    """All figures of several results as text, then what was aimed at, then the papers' figures."""
    out = []
    for title, rows in FIGURES.values():
        if found := rows(results):
            out += [title, table(found), ""]
    for one in results:
        if one.get("prediction"):
            out += [f"The simulator on {one['gpus']} GPUs", prediction.render(one["prediction"]), ""]
    out += [f"Aimed at on {GPUS} GPUs", table(aims(results)), "", "Beside the papers", table(papers(results))]
    short = [f"{one['gpus']} GPUs: {missing(one)} of {one['cells']} cells" for one in results if missing(one)]
    if short:
        out += ["", f"not measured: {'; '.join(short)}"]
    return "\n".join(out)
