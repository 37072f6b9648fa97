"""`moe-ref simulate` and `moe-ref trace`: the actor runtime from the command line (`protocol` has a file of its own).

`--tokens` is per rank, as everywhere; times are microseconds of the simulated machine, not of this one.
"""

from __future__ import annotations

import math
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
from moe_ref.limits import check_memory, check_output_path, check_plot_path, check_seed, printable
from moe_ref.results import provenance, write_results
from moe_ref.runtime import protocol_command
from moe_ref.runtime.calibrate import calibrate
from moe_ref.runtime.machine import PRESETS, Machine, Noise, machine
from moe_ref.runtime.memory import paper_table, table_rows
from moe_ref.runtime.models import MODELS, Result, compare
from moe_ref.runtime.recorded import load_records
from moe_ref.runtime.simulator import Simulator
from moe_ref.runtime.trace import write_trace
from moe_ref.runtime.workload import Workload

MAX_CALLS, MAX_PROCESSORS = 1000, 4096

ELEMENT_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4}

MachineOption = Annotated[str, typer.Option("--machine", help=f"Preset: {', '.join(PRESETS)}.")]
RanksOption = Annotated[int | None, typer.Option("--ranks", help="GPUs; all of the machine's if not given.")]
TokensOption = Annotated[int, typer.Option("--tokens", help="Tokens per rank.")]
ExpertsOption = Annotated[int, typer.Option("--experts", help="Experts of the layer.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="Experts per token.")]
HiddenOption = Annotated[int, typer.Option("--hidden", help="Hidden size H.")]
IntermediateOption = Annotated[int, typer.Option("--intermediate", help="Intermediate size D of an expert.")]
GatedOption = Annotated[bool, typer.Option("--gated/--plain", help="Gated (SwiGLU-like) or plain expert FFN.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32 (TF32 tiles).")]
LayoutOption = Annotated[str, typer.Option("--layout", help="compact, or fixed (the paper's).")]
CapacityOption = Annotated[
    float | None, typer.Option("--capacity-factor", help="Drop rows beyond factor * S * K / E; not given: never drop.")
]
SkewOption = Annotated[float, typer.Option("--skew", help="0 routes evenly; 1 is a Zipf law over the experts.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of routing and noise.")]
JitterOption = Annotated[float, typer.Option("--jitter", help="Relative spread of every duration.")]
LaunchJitterOption = Annotated[float, typer.Option("--launch-jitter", help="Ranks start up to this many us apart.")]
StragglerOption = Annotated[int, typer.Option("--straggler", help="Rank that is slow; -1 for none.")]
SlowdownOption = Annotated[float, typer.Option("--slowdown", help="How much longer the straggler's work takes.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _workload(
    preset: Machine, ranks: int | None, tokens: int, experts: int, top_k: int, hidden: int, intermediate: int,
    gated: bool, dtype: str, layout: str, capacity: float | None, skew: float, seed: int,
) -> Workload:  # fmt: skip
    if dtype not in ELEMENT_SIZE:
        raise UsageError(f"--dtype is {dtype!r}, expected one of {', '.join(ELEMENT_SIZE)}")
    if layout not in ("compact", "fixed"):
        raise UsageError(f"--layout is {layout!r}, expected compact or fixed")
    check_seed(seed, "--seed")
    count = preset.gpus if ranks is None else ranks
    if count > preset.gpus:
        raise UsageError(f"--ranks is {count}, but machine {preset.name} has {preset.gpus} GPUs")
    work = Workload(
        count, tokens, experts, top_k, hidden, intermediate, gated, ELEMENT_SIZE[dtype],
        layout=layout, capacity_factor=capacity, skew=skew, seed=seed,
    )  # fmt: skip
    check_memory(work.memory_bytes, f"{count} ranks x {tokens} tokens x {top_k} choices", "give fewer tokens")
    return work


def _noise(ranks: int, jitter: float, launch_jitter: float, straggler: int, slowdown: float, seed: int) -> Noise:
    if not -1 <= straggler < ranks:
        raise UsageError(f"--straggler is {straggler}, expected a rank from 0 to {ranks - 1}, or -1 for none")
    if not all(map(math.isfinite, (jitter, launch_jitter, slowdown))):
        raise UsageError("--jitter, --launch-jitter and --slowdown must be finite numbers")
    return Noise(jitter, launch_jitter, straggler, slowdown, seed)


def _describe(work: Workload, preset: Machine) -> str:
    return (
        f"{preset.name}: {work.ranks} x {work.tokens} tokens, E {work.experts}, K {work.top_k}, "
        f"H {work.hidden}, D {work.intermediate}, {'gated' if work.gated else 'plain'}, "
        f"{'fp32' if work.element_size == 4 else '16 bit'}, {work.layout}"
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


def simulate(
    machine_name: MachineOption = "h100-8",
    ranks: RanksOption = None,
    tokens: TokensOption = 4096,
    experts: ExpertsOption = 32,
    top_k: TopKOption = 2,
    hidden: HiddenOption = 2048,
    intermediate: IntermediateOption = 2048,
    gated: GatedOption = False,
    dtype: DtypeOption = "bfloat16",
    layout: LayoutOption = "compact",
    capacity_factor: CapacityOption = None,
    skew: SkewOption = 0.0,
    seed: SeedOption = 0,
    model: Annotated[str, typer.Option("--model", help="bulk, chunked, megakernel or all.")] = "all",
    graph: Annotated[bool, typer.Option("--graph", help="The chains run captured as a CUDA graph.")] = False,
    jitter: JitterOption = 0.0,
    launch_jitter: LaunchJitterOption = 0.0,
    straggler: StragglerOption = -1,
    slowdown: SlowdownOption = 2.0,
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
    json_: JsonOption = False,
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
    work = _workload(
        preset, ranks, tokens, experts, top_k, hidden, intermediate, gated, dtype, layout, capacity_factor, skew, seed
    )
    noise = _noise(work.ranks, jitter, launch_jitter, straggler, slowdown, seed)
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

        models_figure(plot, results, preset.sms, _describe(work, preset))
        err.print(f"wrote {escape(printable(str(plot)))}", soft_wrap=True)
    if paper is not None:
        _write_paper(paper, preset, seed)
    if json_:
        print_json(report)
        return
    _print_table(_table(results, _describe(work, preset)))
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


def trace(
    path: Annotated[Path, typer.Option("--out", help="Trace file (JSON, for ui.perfetto.dev).")],
    machine_name: MachineOption = "h200-2",
    ranks: RanksOption = None,
    tokens: TokensOption = 1024,
    experts: ExpertsOption = 8,
    top_k: TopKOption = 2,
    hidden: HiddenOption = 2048,
    intermediate: IntermediateOption = 2048,
    gated: GatedOption = False,
    dtype: DtypeOption = "bfloat16",
    layout: LayoutOption = "compact",
    capacity_factor: CapacityOption = None,
    skew: SkewOption = 0.0,
    seed: SeedOption = 0,
    model: Annotated[str, typer.Option("--model", help="bulk, chunked or megakernel.")] = "megakernel",
    calls: Annotated[int, typer.Option("--calls", help="Layers one after the other (megakernel only).")] = 1,
    processors: Annotated[
        int | None, typer.Option("--processors", help="Processors per rank instead of the machine's.")
    ] = None,
    jitter: JitterOption = 0.0,
    launch_jitter: LaunchJitterOption = 0.0,
    straggler: StragglerOption = -1,
    slowdown: SlowdownOption = 2.0,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Trace a forward with real tensors, routed by a random gate; compare with the reference."
        ),
    ] = False,
    names: Annotated[
        bool, typer.Option("--names", help="Also write metadata events that name the tracks in Perfetto.")
    ] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Gantt picture, PNG.")] = None,
    json_: JsonOption = False,
) -> None:
    """Write what every actor of a simulated layer does, as a Chrome / Perfetto trace."""
    preset = machine(machine_name)
    check_output_path("--out", path)
    if plot is not None:
        check_plot_path(plot)
    work = _workload(
        preset, ranks, tokens, experts, top_k, hidden, intermediate, gated, dtype, layout, capacity_factor, skew, seed
    )
    noise = _noise(work.ranks, jitter, launch_jitter, straggler, slowdown, seed)
    if model not in MODELS:
        raise UsageError(f"--model is {model!r}, expected one of {', '.join(MODELS)}")
    if not 1 <= calls <= MAX_CALLS or (processors is not None and not 1 <= processors <= MAX_PROCESSORS):
        raise UsageError(f"expected --calls from 1 to {MAX_CALLS} and --processors from 1 to {MAX_PROCESSORS}")
    error = None
    if model == "megakernel":
        if check:
            if skew:
                raise UsageError("--check routes with a random layer's gate, so it takes no --skew; leave one out")
            from moe_ref.runtime.numbers import check_against_reference

            error, run = check_against_reference(work, preset, noise, calls, processors, dtype)
        else:
            plans = [work.call(epoch) for epoch in range(calls)]
            run = Simulator(plans, preset, work.experts, noise, processors=processors, record=True).run()
        intervals, end = run.intervals, max(run.ends_us[-1])
    else:
        if calls > 1 or processors is not None or check:
            raise UsageError("--calls, --processors and --check apply to --model megakernel only")
        result = compare(work, preset, (model,), noise, True)[model]
        intervals, end = result.intervals, result.latency_us
    events = write_trace(path, intervals, names, machine=preset.name, model=model, layer=_describe(work, preset))
    if plot is not None:
        from moe_ref.runtime.figures import gantt

        gantt(plot, intervals, f"{model} on {_describe(work, preset)}")
        err.print(f"wrote {escape(printable(str(plot)))}", soft_wrap=True)
    tracks = len({(i.rank, i.actor) for i in intervals})
    if json_:
        report = {"out": printable(str(path)), "model": model, "events": events, "tracks": tracks, "end_us": end}
        print_json(report | ({"relative_error": error} if check else {}))
    else:
        if error is not None:
            out.print(f"relative error against the reference layer: {error:.3g}")
        out.print(
            f"wrote {path}: {events} events on {tracks} tracks, {end:.1f} us; open it in https://ui.perfetto.dev"
            + ("" if names else "; --names names its tracks"),
            soft_wrap=True,
        )


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("simulate")(simulate)
    app.command("trace")(trace)
    protocol_command.register(app)
