"""Scaling runs as text: every figure, what was aimed at, the papers' figures.

A figure has more columns than a page or a terminal has room for, so it is told as several tables. What is the same in
all rows of a table stands in its caption, and what nobody measured has no column.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from moe_fast.bench import prediction
from moe_fast.bench.scaling.aims import GPUS, aims, papers
from moe_fast.bench.scaling.figures import FIGURES, Result, Rows, missing

ABOUT = {
    "layer": "layer", "dtype": "dtype", "gpus": "GPUs", "tokens": "tokens of a GPU", "zipf": "skew",
    "contestant": "contestant", "backend": "backend", "balancing": "balancing", "planned": "planned",
}  # fmt: skip
"""Key -> heading of what says which cell a row is: a column of every table of its figure, or in its caption. How many
experts there are says the layer."""
ORDER = ("dtype", "layer", "tokens", "gpus")
"""Keys that rows of layers and sizes are sorted by."""


@dataclass(frozen=True)
class Column:
    """A measured column: its heading, the dotted key of its values, and what they are multiplied by to be shown."""

    heading: str
    key: str
    times: float = 1.0
    digits: int = 4


@dataclass(frozen=True)
class Table:
    """Rows with headings as keys; None where nothing was measured."""

    caption: str
    rows: Rows


def _named(key: str, *names: str, before: str = "", times: float = 1.0, digits: int = 4) -> tuple[Column, ...]:
    """A column for each of these names of an inner object."""
    return tuple(Column(before + name.replace("_", " "), f"{key}.{name}", times, digits) for name in names)


CHAINS = ("fused", "floor", "eager", "graph")
CONTESTANTS = ("plain", "eplb", "symmetric", "asymmetric", "given")
MIB = {"times": 2**-20, "digits": 1}
PERCENT = {"times": 100.0, "digits": 1}

TABLES: dict[str, tuple[tuple[str, tuple[Column, ...]], ...]] = {
    "speed": (
        ("ms per call", (
            *_named("ms", *CHAINS),
            Column("fused / floor", "fused_over_floor"), Column("eager / fused", "eager_over_fused"),
            Column("graph / fused", "graph_over_fused"),
        )),
        ("Throughput of all GPUs, rate of each, and overlap efficiency O_e", (
            Column("million tokens / s", "million_tokens_per_s"), Column("TFLOP/s of a GPU", "tflops_per_gpu"),
            *_named("overlap_efficiency", "fused", "eager", "graph", before="O_e "),
        )),
    ),
    "wire": (
        ("ms per call, and TFLOP/s of a GPU", (
            *_named("ms", "routes", "tokens", before="ms, "),
            *_named("tflops_per_gpu", "routes", "tokens", before="TFLOP/s, "),
            *_named("remote_bytes", "routes", "tokens", before="MiB sent, ", **MIB),
        )),
    ),
    "timeline": (
        ("Share of the call that processors spend in products, and in their main loops alone", (
            Column("call, us", "wall_us"), Column("products, %", "utilisation", **PERCENT),
            Column("main loops, %", "main_loops", **PERCENT),
        )),
        ("Where the time goes, % of the call", _named(
            "share", "gate", "list", "push", "gemm0", "gemm1", "combine", "plan", "solve", "wait",
            times=100.0, digits=2)),
    ),
    "costs": (
        ("GPU operations of a call", _named("gpu_operations", "fused", "eager", "graph")),
        ("MiB of a GPU", (
            *_named("bytes", "symmetric", "workspace", "experts", **MIB), Column("eager chain", "bytes.eager", **MIB),
        )),
    ),
    "balance": (
        ("ms per call", _named("ms", *CONTESTANTS, "balanced")),
        ("In times the perfectly balanced layer", (
            *_named("over_balanced", *CONTESTANTS), Column("solving, us", "solving_us"))),
        ("Maximum over mean load of a rank", _named("max_over_mean_load", *CONTESTANTS[:-1])),
    ),
    "stages": (
        ("us", tuple(Column(name, name) for name in (
            "gate", "dispatch", "compute", "combine", "busy", "solve", "wall"))),
    ),
    "training": (
        ("", (
            Column("ms per step", "ms"), Column("maximum / mean load", "max_over_mean_load"),
            Column("loss, first and last", "loss"),
        )),
    ),
}  # fmt: skip
"""Figure -> its tables: (caption, measured columns)."""


def flat(row: dict[str, Any], before: str = "") -> dict[str, Any]:
    """A row with the values of inner objects under dotted keys; of a median with its minimum, the median."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict) and "median" in value:
            out[before + key] = value["median"]
        elif isinstance(value, dict):
            out |= flat(value, f"{before}{key}.")
        else:
            out[before + key] = value
    return out


def tables(figure: str, results: list[Result]) -> list[Table]:
    """The tables of a figure of several results; none where nothing is measured."""
    lines = [flat(row) for row in FIGURES[figure][1](results)]
    if all(set(ORDER[1:]) <= set(line) for line in lines):
        lines.sort(key=lambda line: [_natural(line.get(key, "")) for key in ORDER])
    about = {key: heading for key, heading in ABOUT.items() if any(line.get(key) is not None for line in lines)}
    same = {key for key in about if len({line.get(key) for line in lines}) == 1}
    facts = ", ".join(_fact(key, about[key], lines[0][key]) for key in about if key in same)
    out = []
    for caption, columns in TABLES[figure]:
        there = [column for column in columns if any(line.get(column.key) is not None for line in lines)]
        if not there:
            continue
        rows = [
            {heading: line.get(key) for key, heading in about.items() if key not in same}
            | {column.heading: _shown(line.get(column.key), column) for column in there}
            for line in lines
        ]
        out.append(Table("; ".join(filter(None, (caption, facts))), rows))
    return out


def _natural(value: Any) -> list[tuple[str, int]]:
    """Sorts "paper-e8" before "paper-e32", and numbers by size."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", str(value))]


def _fact(key: str, heading: str, value: Any) -> str:
    """What is the same in all rows, for a caption: "2 GPUs", "layer paper-e8"."""
    return f"{value} {heading}" if key in ("gpus", "tokens") else f"{heading} {value}"


def _shown(value: Any, column: Column) -> Any:
    return value if value is None or column.times == 1.0 else round(value * column.times, column.digits)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(_text(v) for v in value)
    return f"{value:g}" if isinstance(value, (int, float)) and abs(value) < 1e6 else str(value)


def table(rows: Rows) -> str:
    """Rows of plain values as aligned text."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[name.replace("_", " ") for name in columns], *([_text(one.get(n)) for n in columns] for one in rows)]
    widths = [max(len(cell[i]) for cell in cells) for i in range(len(columns))]
    return "\n".join("  ".join(text.rjust(w) for text, w in zip(cell, widths, strict=True)).rstrip() for cell in cells)


def render(results: list[Result]) -> str:
    """All figures of several results as text, then what was aimed at, then the papers' figures."""
    out = []
    for figure, (title, _) in FIGURES.items():
        if found := tables(figure, results):
            out.append(title)
            out += [line for one in found for line in (*filter(None, [one.caption]), table(one.rows), "")]
    for one in results:
        if one.get("prediction"):
            out += [f"The simulator on {one['gpus']} GPUs", prediction.render(one["prediction"]), ""]
    out += [f"Aimed at on {GPUS} GPUs", table(aims(results)), ""]
    out += [f"Beside the papers, here on {results[-1]['gpus']} GPUs", table(papers(results))]
    short = [f"{one['gpus']} GPUs: {missing(one)} of {one['cells']} cells" for one in results if missing(one)]
    if short:
        out += ["", f"not measured: {'; '.join(short)}"]
    return "\n".join(out)
