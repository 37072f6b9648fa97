"""Scaling runs in a page: what `moe_fast.bench scaling` recorded, beside the papers' figures; or how to record it.

A page asks for it by {{ scaling }}. Tables come from docs/results/scaling_*gpu.json, all numbers of GPUs together.
"""

from __future__ import annotations

from typing import Any

from docs._tools import results
from moe_fast.bench.scaling import aims, figures
from moe_fast.bench.scaling.report import flat

WANTED = (4, 8)
"""Numbers of GPUs that the papers' figures are about."""
COMMAND = (
    "python -m moe_fast.bench scaling compile --ranks {0}\n"
    "torchrun --nproc-per-node {0} -m moe_fast.bench scaling --out docs/results/scaling_{0}gpu.json"
)


def recorded() -> list[dict[str, Any]]:
    """All recorded runs, by number of GPUs."""
    names = [name for name in results.names() if name.startswith("scaling_")]
    return figures.ordered(results.load(name) for name in names)


def page() -> str:
    """Markdown: what is not recorded yet and the commands that record it, then every table that there is."""
    found = recorded()
    out = [_missing({one["gpus"] for one in found})]
    for one in found:
        if short := figures.missing(one):
            out += [f"The run on {one['gpus']} GPUs lacks {short} of its {one['cells']} cells.", ""]
    out += ["## What was aimed at on 8 GPUs", "", _table(aims.aims(found)), ""]
    out += ["## Beside the papers", "", _table(aims.papers(found)), ""]
    for title, rows in figures.FIGURES.values():
        if made := rows(found):
            out += [f"## {title}", "", _table(made), ""]
    for one in found:
        if one.get("prediction"):
            out += _predicted(one)
        out += [results.provenance(f"scaling_{one['gpus']}gpu")]
    return "\n".join(out)


def _missing(there: set[int]) -> str:
    """What to say about the numbers of GPUs without a run; overlap efficiency needs that on two GPUs, too."""
    gpus = [count for count in WANTED if count not in there]
    if not gpus:
        return ""
    several = " and ".join(map(str, gpus))
    lines = [
        f'!!! warning "Not measured on {several} GPUs yet"',
        "",
        f"    No run on {several} GPUs of one host has been made yet"
        + (
            ", so the tables below have nothing from there. "
            if there
            else ", and none on fewer: the tables are empty. "
        )
        + "On such a machine these commands make them; overlap efficiency is relative to the run on 2. A run that is "
        "cut short goes on when it is started again:",
        "",
        "    ```text",
        *(f"    {line}" for count in sorted({2, *gpus} - there) for line in COMMAND.format(count).splitlines()),
        "    ```",
        "",
    ]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> str:
    return results.table([flat(row) for row in rows])


def _predicted(one: dict[str, Any]) -> list[str]:
    p = one["prediction"]
    return [
        f"## The simulator on {one['gpus']} GPUs", "",
        f"Fitted to {p['fitted_cells']} cells; on the others the median error is {p['median_error']:.1%}, the worst "
        f"{p['worst_error']:.1%}.", "", results.table(p["rows"]), "",
    ]  # fmt: skip
