"""Scaling runs in a page: what `moe_fast.bench scaling` recorded, beside the papers' figures; or how to record it.

A page asks for a part of it by {{ scaling PART }}: "missing" (what is not recorded yet, and the commands that record
it), "aims", "papers", "figure", "prediction", "provenance", or the name of a figure of
[`figures`][moe_fast.bench.scaling.figures]. Tables come from docs/results/scaling_*gpu.json, all numbers of GPUs
together, and so does the figure, `recorded/scaling.svg`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs._tools import results
from moe_fast.bench.scaling import aims, figures, plot
from moe_fast.bench.scaling.report import tables
from moe_ref.errors import UsageError

WANTED = (4, 8)
"""Numbers of GPUs that the papers' figures are about."""
COMMAND = (
    "python -m moe_fast.bench scaling compile --ranks {0}\n"
    "torchrun --nproc-per-node {0} -m moe_fast.bench scaling --out docs/results/scaling_{0}gpu.json"
)
FIGURE = "recorded/scaling.svg"


def recorded() -> list[dict[str, Any]]:
    """All recorded runs, by number of GPUs."""
    names = [name for name in results.names() if name.startswith("scaling_")]
    return figures.ordered(results.load(name) for name in names)


def part(name: str) -> str:
    """Markdown of a part; see the module's docstring.

    Raises:
        ResultMissing: there is no such part.
    """
    found = recorded()
    if name in figures.FIGURES:
        return _figure(name, found)
    if name not in PARTS:
        known = ", ".join((*PARTS, *figures.FIGURES))
        raise results.ResultMissing(f"no part {name!r} of scaling runs; there are {known}")
    return PARTS[name](found)


def drawing() -> dict[str, bytes]:
    """The figure by its address in the source of the site; empty where there is nothing to draw."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scaling.svg"
        try:
            plot.plot(recorded(), path)
        except UsageError:
            return {}
        return {FIGURE: path.read_bytes()}


def _renamed(rows: list[dict[str, Any]], key: str, heading: str) -> str:
    """A table in which one column has another heading than its key."""
    return results.table([{heading if name == key else name: value for name, value in row.items()} for row in rows])


def _aims(found: list[dict[str, Any]]) -> str:
    return _renamed(aims.aims(found), "reached", f"on {aims.GPUS} GPUs")


def _papers(found: list[dict[str, Any]]) -> str:
    return _renamed(aims.papers(found), "here", f"here, {found[-1]['gpus']} GPUs" if found else "here")


def _drawn(found: list[dict[str, Any]]) -> str:
    if not drawing():
        return ""
    what = "Latency against tokens and experts, throughput, and the layer's time at each skew"
    return f"![{what}; {_gpus([one['gpus'] for one in found])}]({Path(FIGURE).name})\n"


def _gpus(counts: list[int], joined: str = " and ") -> str:
    return f"{joined.join(map(str, counts))} GPUs"


def _missing(found: list[dict[str, Any]]) -> str:
    """What to say about the numbers of GPUs without a run; overlap efficiency needs that on two GPUs, too."""
    there = {one["gpus"] for one in found}
    lines = [
        f"The run on {one['gpus']} GPUs lacks {short} of its {one['cells']} cells.\n"
        for one in found
        if (short := figures.missing(one))
    ]
    gpus = [count for count in WANTED if count not in there]
    if not gpus:
        return "\n".join(lines)
    several = _gpus(gpus, " or ")
    return "\n".join([
        f'!!! warning "Not measured on {several} yet"',
        "",
        f"    No machine with {several} could be had yet, "
        + (
            f"so the tables below have nothing from there: what they show is from {_gpus(sorted(there))}. "
            if there
            else "and no run on fewer has been made: the tables are empty. "
        )
        + "These commands make the runs, on one host with that many GPUs; overlap efficiency is relative to the run on "
        "2. The first of each pair needs no GPU. A run that is cut short goes on when it is started again:",
        "",
        "    ```text",
        *(f"    {line}" for count in sorted({2, *gpus} - there) for line in COMMAND.format(count).splitlines()),
        "    ```",
        "",
        *lines,
    ])  # fmt: skip


def _figure(name: str, found: list[dict[str, Any]]) -> str:
    made = [f"{one.caption + ':' if one.caption else ''}\n\n{results.table(one.rows)}" for one in tables(name, found)]
    return "\n".join(made) or "Not measured yet.\n"


def _predicted(found: list[dict[str, Any]]) -> str:
    out = []
    for one in found:
        if p := one.get("prediction"):
            out.append(
                f"{one['gpus']} GPUs: fitted to {p['fitted_cells']} cells; on the others the median error is "
                f"{p['median_error']:.1%}, the worst {p['worst_error']:.1%}:\n\n{results.table(p['rows'])}"
            )
    return "\n".join(out) or "Not predicted yet.\n"


def _provenance(found: list[dict[str, Any]]) -> str:
    return "\n".join(results.provenance(f"scaling_{one['gpus']}gpu") for one in found)


PARTS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "missing": _missing,
    "aims": _aims,
    "papers": _papers,
    "figure": _drawn,
    "prediction": _predicted,
    "provenance": _provenance,
}
"""What a page can ask for beside the figures."""
