"""`moe-ref trace`: what every actor of a simulated layer does, as a trace to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from moe_ref.console import err, out, print_json
from moe_ref.errors import UsageError
from moe_ref.limits import check_output_path, check_plot_path, printable
from moe_ref.runtime import options
from moe_ref.runtime.machine import machine
from moe_ref.runtime.models import MODELS, compare
from moe_ref.runtime.simulator import Simulator
from moe_ref.runtime.trace import write_trace

MAX_CALLS, MAX_PROCESSORS = 1000, 4096


def trace(
    path: Annotated[Path, typer.Option("--out", help="Trace file (JSON, for ui.perfetto.dev).")],
    machine_name: options.MachineOption = "h200-2",
    ranks: options.RanksOption = None,
    tokens: options.TokensOption = 1024,
    experts: options.ExpertsOption = 8,
    top_k: options.TopKOption = 2,
    hidden: options.HiddenOption = 2048,
    intermediate: options.IntermediateOption = 2048,
    gated: options.GatedOption = False,
    dtype: options.DtypeOption = "bfloat16",
    layout: options.LayoutOption = "compact",
    capacity_factor: options.CapacityOption = None,
    skew: options.SkewOption = 0.0,
    seed: options.SeedOption = 0,
    model: Annotated[str, typer.Option("--model", help="bulk, chunked or megakernel.")] = "megakernel",
    calls: Annotated[int, typer.Option("--calls", help="Layers one after the other (megakernel only).")] = 1,
    processors: Annotated[
        int | None, typer.Option("--processors", help="Processors per rank instead of the machine's.")
    ] = None,
    jitter: options.JitterOption = 0.0,
    launch_jitter: options.LaunchJitterOption = 0.0,
    straggler: options.StragglerOption = -1,
    slowdown: options.SlowdownOption = 2.0,
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
    json_: options.JsonOption = False,
) -> None:
    """Write what every actor of a simulated layer does, as a Chrome / Perfetto trace."""
    preset = machine(machine_name)
    check_output_path("--out", path)
    if plot is not None:
        check_plot_path(plot)
    work = options.workload(
        preset, ranks, tokens, experts, top_k, hidden, intermediate, gated, dtype, layout, capacity_factor, skew, seed
    )
    noise = options.noise(work.ranks, jitter, launch_jitter, straggler, slowdown, seed)
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
    events = write_trace(path, intervals, names, machine=preset.name, model=model, layer=options.describe(work, preset))
    if plot is not None:
        from moe_ref.runtime.figures import gantt

        gantt(plot, intervals, f"{model} on {options.describe(work, preset)}")
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
