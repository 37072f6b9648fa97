"""The simulator, calibrated on half of the benchmark's cells, predicts the other half.

    python -m moe_fast.bench predict --out docs/results/simulator_prediction.json

Needs no GPU: it reads recorded benchmark results. Cells alternate, in the order of the files, between the half that the
machine is fitted to and the half that it predicts, so both halves have every layer and every order of size.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from moe_fast.bench.layers import layer_config
from moe_fast.bench.tables import read_results
from moe_ref.runtime.calibrate import calibrate, simulate_ms
from moe_ref.runtime.machine import machine
from moe_ref.runtime.recorded import Record
from moe_ref.runtime.workload import Workload

ASKS_LATE = {"mailbox": 1, "scheduler_us": 0.0}
"""The presets' machine runs the kernel that was recorded for them, in which a processor had its next task in its
mailbox while it ran another. Today's asks for it 8 steps before its loads end: no task waits behind a
running one, and the scheduler's answer is there when the task is needed."""
FITTED = ("flops_16", "exposed", "remote_us")
"""Parameters of the machine that the first half fits."""


def records(rows: list[dict[str, Any]]) -> list[tuple[str, Record]]:
    """(layer, record) of the rows of benchmark results."""
    out = []
    for row in rows:
        c = layer_config(row["layer"])
        work = Workload(
            ranks=row["gpus"],
            tokens=row["tokens"],
            experts=c.experts,
            top_k=c.top_k,
            hidden=c.hidden,
            intermediate=c.intermediate,
            gated=c.gated,
        )
        out.append((row["layer"], Record("megakernel", work, row["ms"]["fused"]["median"])))
    return out


def predict(paths: list[Path], preset: str = "h200-2") -> dict[str, Any]:
    """Fit on the cells of even position in these files, predict the others."""
    return predict_rows([row for path in paths for row in read_results(path)["rows"]], preset)


def predict_rows(rows: list[dict[str, Any]], preset: str) -> dict[str, Any]:
    """The same of rows that are at hand."""
    cells = records(rows)
    fit = calibrate(machine(preset).replace(**ASKS_LATE), [r for _, r in cells[::2]])
    predicted = []
    for layer, record in cells[1::2]:
        simulated = simulate_ms(record, fit.machine)
        predicted.append(
            {
                "layer": layer,
                "gpus": record.work.ranks,
                "tokens": record.work.tokens,
                "measured_ms": record.ms,
                "simulated_ms": round(simulated, 4),
                "error": round(simulated / record.ms - 1, 4),
            }
        )
    errors = [abs(row["error"]) for row in predicted]
    return {
        "preset": preset,
        "changed": ASKS_LATE,
        "fitted": {name: float(f"{getattr(fit.machine, name):.4g}") for name in FITTED},
        "fitted_cells": len(cells[::2]),
        "fit_median_error": round(statistics.median(abs(e) for e in fit.errors), 4),
        "median_error": round(statistics.median(errors), 4),
        "worst_error": max(errors),
        "rows": predicted,
    }


def render(results: dict[str, Any]) -> str:
    """The predicted cells as text."""
    lines = [
        f"calibrated on {results['fitted_cells']} cells; predicted: median error {results['median_error']:.1%}, "
        f"worst {results['worst_error']:.1%}",
        f"{'layer':12} {'GPUs':>4} {'S':>6} {'measured':>9} {'simulated':>9} {'error':>7}",
    ]
    for r in results["rows"]:
        lines.append(
            f"{r['layer']:12} {r['gpus']:>4} {r['tokens']:>6} {r['measured_ms']:9.3f} {r['simulated_ms']:9.3f} "
            f"{r['error']:7.1%}"
        )
    return "\n".join(lines)
