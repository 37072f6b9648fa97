"""`moe-ref simulate`: one layer on a simulated machine under several execution models."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from moe_ref.console import err, out, print_json
from moe_ref.errors import UsageError
from moe_ref.limits import check_plot_path, printable
from moe_ref.results import provenance, write_results
from moe_ref.runtime import options
from moe_ref.runtime.calibrate import calibrate
from moe_ref.runtime.machine import Machine, machine
from moe_ref.runtime.memory import paper_table, table_rows
from moe_ref.runtime.models import MODELS, Result, compare
from moe_ref.runtime.recorded import load_records


def simulate(
    machine_name: options.MachineOption = "h100-8",
    ranks: options.RanksOption = None,
    tokens: options.TokensOption = 4096,
    experts: options.ExpertsOption = 32,
    top_k: options.TopKOption = 2,
    hidden: options.HiddenOption = 2048,
    intermediate: options.IntermediateOption = 2048,
    gated: options.GatedOption = False,
    dtype: options.DtypeOption = "bfloat16",
    layout: options.LayoutOption = "compact",
    capacity_factor: options.CapacityOption = None,
    skew: options.SkewOption = 0.0,
    seed: options.SeedOption = 0,
    model: Annotated[str, typer.Option("--model", help="bulk, chunked, megakernel or all.")] = "all",
    graph: Annotated[bool, typer.Option("--graph", help="The chains run captured as a CUDA graph.")] = False,
    jitter: options.JitterOption = 0.0,
    launch_jitter: options.LaunchJitterOption = 0.0,
    straggler: options.StragglerOption = -1,
    slowdown: options.SlowdownOption = 2.0,
    records: Annotated[
        Path | None, typer.Option("--records", help="JSON list of recorded runs to calibrate the machine with first.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="PNG: how busy each model keeps the GPUs.")] = None,
    paper: Annotated[
        Path | None, typer.Option("--paper", help="Folder for the paper's figures, tables and their data.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Add the symmetric-memory table of the paper's layer.")
    ] = False,
    json_: options.JsonOption = False,
) -> None:
    """Time one layer on a simulated machine under several execution models.

    SM use: share of the time in which the multiprocessors compute. overlap: latency on 2 GPUs over latency on this
    many, the tokens of each the same; 1 means that more GPUs cost no time. GPU ops: launches and copies of each GPU.
    MB sent: rows and results that leave a GPU, all GPUs together.
    """
    preset = machine(machine_name)
    if plot is not None:
        check_plot_path(plot)
    if paper is not None and preset.gpus < 8:
        raise UsageError(f"--paper needs a machine of at least 8 GPUs, {preset.name} has {preset.gpus}")
    if model not in (*MODELS, "all"):
        raise UsageError(f"--model is {model!r}, expected {', '.join(MODELS)} or all")
    fitted: dict[str, Any] | None = None
    if records is not None:
        found = calibrate(preset, load_records(records))
        preset, fitted = found.machine, found.summary()
    work = options.workload(
        preset, ranks, tokens, experts, top_k, hidden, intermediate, gated, dtype, layout, capacity_factor, skew, seed
    )
    noise = options.noise(work.ranks, jitter, launch_jitter, straggler, slowdown, seed)
    models = MODELS if model == "all" else (model,)
    results = compare(work, preset, models, noise, plot is not None, graph)
    report: dict[str, Any] = {
        "machine": preset.name,
        **{n: getattr(work, n) for n in ("ranks", "tokens", "experts", "top_k", "hidden", "intermediate", "gated")},
        "dtype": dtype,
        "layout": layout,
        "capacity_factor": capacity_factor,
        "graph": graph,
        "seed": seed,
        "models": {name: r.to_dict() for name, r in results.items()},
    }
    if fitted is not None:
        report["calibration"] = fitted
    if memory:
        report["memory"] = table_rows(paper_table(), preset.memory_bytes)
    if plot is not None:
        from moe_ref.runtime.figures import models_figure

        models_figure(plot, results, preset.sms, options.describe(work, preset))
        err.print(f"wrote {escape(printable(str(plot)))}", soft_wrap=True)
    if paper is not None:
        _write_paper(paper, preset, seed)
    if json_:
        print_json(report)
        return
    _print_table(_table(results, options.describe(work, preset)))
    if fitted is not None:
        out.print(fitted)
    if memory:
        _print_table(_memory_table(report["memory"], preset))


def _memory_table(rows: list[dict[str, Any]], preset: Machine) -> Table:
    table = Table(title=f"symmetric memory per GPU; shares of {preset.memory_bytes / 1e9:.0f} GB")
    for name in ("layout", "dtype", "S", "E", "formula, bytes", "allocated, bytes", "share", "touched, bytes"):
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(
            r["layout"], r["dtype"], str(r["tokens"]), str(r["experts"]), str(r["formula_bytes"]),
            str(r["allocated_bytes"]), f"{r['share']:.2%}", str(r["touched_bytes"]),
        )  # fmt: skip
    return table


def _write_paper(folder: Path, preset: Machine, seed: int) -> None:
    """figures.png, table.md, memory.md and simulator_paper.json."""
    from moe_ref.runtime.figures import paper_figures
    from moe_ref.runtime.paper import comparison_table, memory_table, run_sweeps

    folder.mkdir(parents=True, exist_ok=True)
    sweeps = run_sweeps(preset, seed)
    paper_figures(folder / "figures.png", sweeps)
    (folder / "table.md").write_text(comparison_table(sweeps))
    (folder / "memory.md").write_text(memory_table(sweeps))
    command = shlex.join(["moe-ref", *sys.argv[1:]])
    about = {
        "title": "FlashMoE's figures from the simulator",
        "description": f"Computed with the cost model of {preset.name}; nothing here was measured on that machine.",
    }
    write_results(folder / "simulator_paper.json", about | provenance(command) | sweeps.to_dict())
    err.print(
        f"wrote figures.png, table.md, memory.md and simulator_paper.json in {escape(printable(str(folder)))}",
        soft_wrap=True,
    )


def _print_table(table: Table) -> None:
    """As wide as its numbers need, also on a narrower terminal: no number is cut."""
    before = out.width
    needed = Measurement.get(out, out.options.update(width=1000), table).maximum
    if needed > before:
        out.width = needed
    out.print(table)
    if needed > before:
        out.width = before


def _table(results: dict[str, Result], title: str) -> Table:
    table = Table(title=title)
    for name in ("model", "us", "SM use", "overlap", "GPU ops", "MB sent", "MTokens/s"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for model, r in results.items():
        overlap = "-" if r.overlap_efficiency is None else f"{r.overlap_efficiency:.3f}"
        table.add_row(
            model, f"{r.latency_us:.1f}", f"{r.utilisation:.1%}", overlap, str(r.gpu_ops),
            f"{r.bytes_sent / 1e6:.1f}", f"{r.tokens_per_s / 1e6:.2f}",
        )  # fmt: skip
    return table
