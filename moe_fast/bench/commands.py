"""The commands of `python -m moe_fast.bench`, also `moe-ref bench`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from moe_fast.bench.contestants import run_bench, run_dtypes, run_trace
from moe_fast.bench.layers import LAYERS
from moe_fast.bench.measure import place
from moe_fast.bench.process import finish, join
from moe_fast.bench.scaling.command import scaling_command
from moe_fast.bench.tables import read_results, render, with_targets
from moe_fast.kernel.constants import SCHEDULERS
from moe_ref.console import err
from moe_ref.errors import UsageError
from moe_ref.limits import check_output_path, check_plot_path, printable

app = typer.Typer(
    rich_markup_mode="markdown",
    help="Time the fused kernel against the chain it replaces and the dense floor.",
    no_args_is_help=True,
    add_completion=False,  # that of moe-ref, whose command this is
    context_settings={"help_option_names": ["-h", "--help"]},
)
RECORDED = Path(__file__).parents[2] / "docs" / "results"
"""The committed results, in a checkout; an installed wheel has none."""


def known_scheduler(name: str) -> str:
    """A scheduler's name, checked before anything looks for a GPU."""
    if name not in SCHEDULERS:
        raise UsageError(f"--scheduler is {name!r}, expected one of {', '.join(SCHEDULERS)}")
    return name


SCHEDULER = typer.Option("spare_warps", callback=known_scheduler, help="spare_warps, os_block or tickets.")


def _layers(text: str) -> list[str]:
    """Names of layers, checked."""
    chosen = [name for name in text.split(",") if name]
    if not chosen:
        raise UsageError(f"--layers is {text!r}, expected some of {', '.join(LAYERS)}")
    unknown = sorted(set(chosen) - set(LAYERS))
    if unknown:
        raise UsageError(f"unknown layers {unknown}; known: {', '.join(LAYERS)}")
    return chosen


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Values of an option, separated by commas, checked."""
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise UsageError(f"{option} is {text!r}, expected numbers of at least 0, separated by commas")
    return found


@app.command("run")
def run_command(
    layers: str = typer.Option(",".join(LAYERS), help="Layers, separated by commas."),
    tokens: str = typer.Option("", help="Only these S, separated by commas."),
    repetitions: int = typer.Option(15, min=1, help="Timed calls of each contestant."),
    scheduler: str = SCHEDULER,
    chains: bool = typer.Option(True, help="Time the unfused chain too."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
    as_json: bool = typer.Option(False, "--json", help="Print the results as one JSON object."),
) -> None:
    """Time every contestant."""
    chosen, sizes = _layers(layers), _numbers("--tokens", tokens, int) if tokens else None
    join(out)
    rows = run_bench(chosen, sizes, repetitions, scheduler, chains)
    title = f"The megakernel's times on {place()[1]} GPU{'s' * (place()[1] > 1)}"
    description = "Fused kernel, unfused chain (eager, graph) and dense floor, interleaved in one run; ms, median."
    results = {"rows": rows}
    finish(title, description, results, out, None if as_json else render(results))


@app.command("trace")
def trace_command(
    cells: str = typer.Option("paper-e8:16384,qwen3:8192", help="LAYER:S, several by commas."),
    scheduler: str = SCHEDULER,
    trace: Path | None = typer.Option(None, help="Write the last cell's trace here (Chrome format, for Perfetto)."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Utilisation of the processors and where the rest of the time went, from in-kernel timestamps."""
    chosen = [cell.partition(":")[::2] for cell in cells.split(",")]
    for layer, tokens in chosen:
        if layer not in LAYERS or not tokens.isdigit():
            raise UsageError(f"--cells has {layer}:{tokens}, which is no LAYER:S; layers: {', '.join(LAYERS)}")
    join(out)
    if trace is not None and place()[0] == 0:
        check_output_path("--trace", trace)
    rows = []
    for layer, tokens in chosen:
        rows.append(run_trace(layer, int(tokens), scheduler, trace))
        if place()[0] == 0:
            print(json.dumps(rows[-1]), flush=True)
    title = f"Where a processor's time goes, {place()[1]} GPU{'s' * (place()[1] > 1)}"
    description = "Shares of a call's wall time per kind of work, from in-kernel timestamps; rank 0."
    finish(title, description, {"rows": rows}, out, "")


@app.command("balance")
def balance_command(
    layers: str = typer.Option("paper-e8,paper-e32", help="Layers, separated by commas."),
    tokens: int = typer.Option(8192, help="S."),
    skews: str = typer.Option("0,0.5,1,1.2", help="Zipf exponents of the routing, uniform first."),
    replicas: int = typer.Option(2, help="Replicas of every expert."),
    repetitions: int = typer.Option(15, min=1, help="Timed calls of each contestant."),
    scheduler: str = SCHEDULER,
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Replicas, balanced inside the kernel, against plain placement, at uniform and at skewed routing."""
    from moe_fast.bench import variants

    chosen, numbers = _layers(layers), _numbers("--skews", skews, float)
    join(out)
    if not 1 <= replicas <= place()[1]:
        raise UsageError(f"--replicas is {replicas}, expected 1 to {place()[1]}: one a rank")
    rows = [variants.run_layer(name, tokens, numbers, replicas, scheduler, repetitions) for name in chosen]
    title = f"Balanced inside the kernel: replicas against plain placement on {place()[1]} GPUs"
    description = (
        "ms of one forward, routing handed in with the given Zipf exponent; all contestants interleaved in one run. "
        "solver_us: what the kernel's solver takes, from its own timestamps."
    )
    results = {"rows": rows}
    finish(title, description, results, out)
    if place()[0] == 0:
        print(variants.render(results), file=sys.stderr)


@app.command("transports")
def transports_command(
    layers: str = typer.Option("paper-e8,qwen3", help="Layers, separated by commas."),
    tokens: int = typer.Option(8192, help="S."),
    repetitions: int = typer.Option(15, min=1, help="Timed calls of each contestant."),
    scheduler: str = SCHEDULER,
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Put-with-signal against direct stores, and the fixed layout against the compact one."""
    from moe_fast.bench import variants

    chosen = _layers(layers)
    join(out)
    if place()[1] < 2:
        raise UsageError("several ranks are needed: torchrun --nproc-per-node 2 -m moe_fast.bench transports")
    rows = [variants.run_transports(name, tokens, scheduler, repetitions) for name in chosen]
    title = f"Transports and layouts side by side on {place()[1]} GPUs"
    description = (
        "ms of one forward, routing handed in, uniform; all contestants interleaved in one run, with the same bits. "
        "The fixed layout with capacity factor 2."
    )
    finish(title, description, {"rows": rows}, out)


@app.command("wire")
def wire_command(
    layers: str = typer.Option("qwen3", help="Layers, separated by commas."),
    tokens: str = typer.Option("16384,8192,4096,1024", help="Values of S, separated by commas."),
    repetitions: int = typer.Option(15, min=1, help="Timed calls of each contestant."),
    scheduler: str = SCHEDULER,
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Both wire formats: a row for each route, or one for each token and rank and a partial sum back."""
    from moe_fast.bench import variants

    chosen, sizes = _layers(layers), _numbers("--tokens", tokens, int)
    join(out)
    if place()[1] < 2:
        raise UsageError("several ranks are needed: torchrun --nproc-per-node 2 -m moe_fast.bench wire")
    rows = [row for name in chosen for row in variants.run_wire(name, sizes, scheduler, repetitions)]
    title = f"Wire formats side by side on {place()[1]} GPUs"
    description = (
        "ms of one forward, gate included, both formats interleaved in one run. remote_rows: sent by rank 0 to others, "
        "as many come back; remote_bytes: both ways, with what goes beside the rows, counted term by term."
    )
    finish(title, description, {"rows": rows}, out)


@app.command("schedulers")
def schedulers_command(
    layers: str = typer.Option("paper-e8,paper-e128,qwen3", help="Layers, separated by commas."),
    tokens: str = typer.Option("16384,8192,1024", help="Values of S, separated by commas."),
    repetitions: int = typer.Option(9, min=1, help="Timed calls of each contestant."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """The three schedulers side by side."""
    from moe_fast.bench import variants

    chosen, sizes = _layers(layers), _numbers("--tokens", tokens, int)
    join(out)
    rows = [row for name in chosen for row in variants.run_schedulers(name, sizes, repetitions)]
    gpus = place()[1]
    description = "ms of one forward, gate included; the three schedulers take turns in one run and give the same bits."
    results = {"rows": rows}
    text = variants.render_in_turn(results)
    finish(f"Schedulers side by side, {gpus} GPU{'s' * (gpus > 1)}", description, results, out, text)


@app.command("pairs")
def pairs_command(
    layers: str = typer.Option(",".join(LAYERS), help="Layers, separated by commas."),
    tokens: str = typer.Option("16384,8192,4096,1024", help="Values of S, separated by commas."),
    repetitions: int = typer.Option(9, min=1, help="Timed calls of each contestant."),
    scheduler: str = typer.Option("spare_warps", callback=known_scheduler, help="spare_warps or tickets."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Processors of one block and of two that share their weights, side by side."""
    from moe_fast.bench import variants

    chosen, sizes = _layers(layers), _numbers("--tokens", tokens, int)
    join(out)
    rows = [row for name in chosen for row in variants.run_pairs(name, sizes, scheduler, repetitions)]
    gpus = place()[1]
    description = "ms of one forward, gate included; both kernels take turns in one run and give the same bits."
    results = {"rows": rows}
    text = variants.render_in_turn(results)
    finish(
        f"Pairs of blocks side by side with single ones, {gpus} GPU{'s' * (gpus > 1)}", description, results, out, text
    )


@app.command("table")
def table_command(
    path: Path = typer.Argument(
        RECORDED / "megakernel_bench_2gpu.json", show_default="the committed one", help="Result file."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the rows as JSON."),
) -> None:
    """Show a result file."""
    results = read_results(path)
    print(json.dumps(with_targets(results)) if as_json else render(results))


@app.command("dtypes")
def dtypes_command(
    layers: str = typer.Option(",".join(LAYERS), help="Layers, separated by commas."),
    tokens: int = typer.Option(8192, help="Tokens of each GPU."),
    repetitions: int = typer.Option(15, min=1, help="Timed calls of each contestant."),
    scheduler: str = SCHEDULER,
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """fp16 against bf16."""
    chosen = _layers(layers)
    join(out)
    rows = run_dtypes(chosen, tokens, repetitions, scheduler)
    text = "\n".join(f"{r['layer']:12} {r['tokens']:>6}  fp16 / bf16 {r['fp16_over_bf16']:.3f}" for r in rows)
    finish("fp16 against bf16", "Median ms of the fused kernel, interleaved in one run.", {"rows": rows}, out, text)


@app.command("growth")
def growth_command(
    repetitions: int = typer.Option(15, min=1, help="Timed calls of each cell."),
    scheduler: str = SCHEDULER,
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Time against S from 32 to 16384 and against E from 8 to 256, beside three bounds."""
    from moe_fast.bench import growth

    join(out)
    results = growth.measure(repetitions, scheduler)
    description = "The paper's layer: ms per call, median, and three bounds; growth is against the row before."
    finish(f"How the cost grows, GPUs: {place()[1]}", description, results, out, growth.render(results))


@app.command("plot")
def plot_command(
    path: Path = typer.Argument(
        RECORDED / "megakernel_growth_1gpu.json", show_default="the committed one", help="Result of `growth`."
    ),
    out: Path = typer.Option(Path("growth.svg"), help="Write the figure here."),
) -> None:
    """Plot a result of `growth`; needs matplotlib."""
    from moe_fast.bench import growth

    results = read_results(path, "growth")
    check_plot_path(out, "--out")
    growth.plot(results, out)
    err.print(f"wrote {escape(printable(str(out)))}", soft_wrap=True)


@app.command("blocks")
def blocks_command(
    repetitions: int = typer.Option(9, min=1, help="Timed calls of each contestant."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Blocks of transformers against the same layers on the fused kernel, one GPU."""
    from moe_fast.bench import library_blocks

    join(out)
    if place()[1] > 1:
        raise UsageError("blocks of transformers run on one GPU: start this without torchrun")
    rows = [row for family in library_blocks.BLOCKS for row in library_blocks.compare(family, repetitions)]
    results = {"rows": rows}
    description = (
        "ms per forward, median, host included, alone and in a row; the library's experts are its grouped_mm "
        "implementation."
    )
    text = library_blocks.render(results)
    finish("Blocks of transformers and the fused layer, one GPU", description, results, out, text)


@app.command("predict")
def predict_command(
    paths: list[Path] = typer.Argument(None, help="Results of `run`; by default the committed ones."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Calibrate the simulator on half of the cells of benchmark results and predict the others; needs no GPU."""
    from moe_fast.bench import prediction

    if out is not None:
        check_output_path("--out", out)
    files = paths or [RECORDED / f"megakernel_bench_{gpus}gpu.json" for gpus in (1, 2)]
    with err.status("calibrating on half of the cells, a minute or two ..."):
        results = prediction.predict(files)
    description = "Cells of the benchmark that the calibration has not seen; error is simulated / measured - 1."
    finish("The simulator on cells it has not seen", description, results, out, prediction.render(results))


app.command("scaling")(scaling_command)
