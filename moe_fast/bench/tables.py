"""Benchmark results read back and as a table, what was aimed at beside what was reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_fast.bench.layers import TARGETS
from moe_ref.errors import UsageError
from moe_ref.limits import regular_file_size


def read_results(path: Path, kind: str = "run") -> dict[str, Any]:
    """A result file of `bench run` or `bench growth`.

    Raises:
        UsageError: it is none; the message says what was expected.
    """
    expected = f"results that `bench {kind} --out` wrote"
    regular_file_size(path, expected)
    try:
        results = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} can't be read as JSON ({error}), expected {expected}") from error
    try:
        good = _is_run(results) if kind == "run" else _is_growth(results)
    except (KeyError, TypeError):
        good = False
    if not good:
        raise UsageError(f"{path} holds no rows of `bench {kind}`, expected {expected}")
    return results


def _is_run(results: Any) -> bool:
    return bool(results["rows"]) and all(
        isinstance(row["layer"], str)
        and row["gpus"] > 0
        and row["tokens"] > 0
        and row["fused_over_floor"] > 0
        and all(row["ms"][name]["median"] > 0 for name in ("floor", "fused"))
        for row in results["rows"]
    )


def _is_growth(results: Any) -> bool:
    return all(
        row[name] > 0 and row["ms"] > 0 and isinstance(row["bounds_ms"], dict)
        for name in ("tokens", "experts")
        for row in results[name]
    )


def with_targets(results: dict[str, Any]) -> dict[str, Any]:
    """Add to every row what was aimed at and whether it is met; None where nothing was."""
    rows = []
    for row in results["rows"]:
        target = TARGETS.get((row["layer"], row["gpus"]), {}).get(row["tokens"])
        rows.append({**row, "target": target, "met": None if target is None else row["fused_over_floor"] <= target})
    return {**results, "rows": rows}


def render(results: dict[str, Any]) -> str:
    """The table of a result file."""
    lines = [
        "milliseconds per call, median; S: tokens of each GPU; floor: the products as dense GEMMs of the library",
        f"{'layer':12} {'GPUs':>4} {'S':>6} {'floor':>8} {'fused':>8} {'eager':>8} {'graph':>8}"
        "  fused/floor  aim   eager/f  graph/f",
    ]
    for row in with_targets(results)["rows"]:
        ms = {name: f"{value['median']:.3f}" for name, value in row["ms"].items()}
        lines.append(
            f"{row['layer']:12} {row['gpus']:>4} {row['tokens']:>6} {ms['floor']:>8} {ms['fused']:>8} "
            f"{ms.get('eager', '-'):>8} {ms.get('graph', '-'):>8}  {row['fused_over_floor']:>11.2f}  "
            f"{'' if row['target'] is None else row['target']:<4}  "
            f"{row.get('eager_over_fused', float('nan')):>7.2f}  {row.get('graph_over_fused', float('nan')):>7.2f}"
        )
    return "\n".join(lines)
