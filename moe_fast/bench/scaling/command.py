"""`bench scaling`: the command line of scaling runs, and what each of its steps does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import typer

from moe_fast.bench.measure import place
from moe_fast.bench.process import join, with_provenance
from moe_fast.bench.scaling import cells as planning
from moe_fast.bench.scaling.aims import aims, papers
from moe_fast.bench.scaling.cells import FIGURES
from moe_fast.bench.scaling.figures import FIGURES as REPORTED
from moe_fast.bench.scaling.figures import ordered, predicted
from moe_fast.bench.scaling.measuring import Measuring
from moe_fast.bench.scaling.plot import plot
from moe_fast.bench.scaling.report import render
from moe_fast.bench.scaling.runner import Store, read, run
from moe_fast.kernel.constants import SCHEDULERS
from moe_ref.cli import exit_code
from moe_ref.environment import rank_from_environment
from moe_ref.errors import UsageError
from moe_ref.limits import check_plot_path

STEPS = ("measure", "cells", "compile", "predict", "show")
REPETITIONS, QUICK_REPETITIONS = 15, 5


def scaling_command(
    step: str = typer.Argument(
        "measure",
        help="measure; cells: name them; compile: their kernels, ahead of time; predict: calibrate the simulator on "
        "half of the measured cells and write its error on the others into the file; show: report what is there. All "
        "but measure need no GPU.",
    ),
    out: Path | None = typer.Option(
        None,
        help="Result file, written after every cell; one that is there is gone on with. By default scaling_Pgpu.json.",
    ),
    beside: list[Path] = typer.Option(
        [], help="Results of other numbers of GPUs for the report, several times; by default those beside the file."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    figure: Path | None = typer.Option(None, "--plot", help="Write a figure here (.svg, .png, .pdf)."),
    quick: bool = typer.Option(False, "--quick", help="Fewer cells, smaller S, five repetitions: does it all work?"),
    budget: float | None = typer.Option(None, help="Seconds after which no further cell is begun."),
    figures: str = typer.Option(",".join(FIGURES), help="What to measure, separated by commas."),
    repetitions: int | None = typer.Option(None, help="Timed calls of each contestant; 15, with --quick 5."),
    scheduler: str = typer.Option("spare_warps", help="spare_warps, os_block or tickets."),
    ranks: int | None = typer.Option(None, help="Number of GPUs, for cells and compile; else torchrun says it."),
    jobs: int = typer.Option(1, help="Kernels that compile makes at a time."),
    anew: bool = typer.Option(False, "--anew", help="Replace the file instead of going on with it."),
    retry: bool = typer.Option(False, "--retry", help="Try cells again that have ended two runs."),
) -> None:
    """The papers' figures on any number of GPUs, into one file that every run goes on with."""
    if step not in STEPS:
        raise UsageError(f"{step!r} is no step of a scaling run, expected one of {', '.join(STEPS)}")
    chosen = [name for name in figures.split(",") if name]
    if unknown := sorted(set(chosen) - set(FIGURES)):
        raise UsageError(f"--figures has {', '.join(unknown)}, expected some of {', '.join(FIGURES)}")
    if not chosen:
        raise UsageError(f"--figures names none, expected some of {', '.join(FIGURES)}")
    if scheduler not in SCHEDULERS:
        raise UsageError(f"--scheduler is {scheduler!r}, expected one of {', '.join(SCHEDULERS)}")
    for option, value in (("--budget", budget), ("--repetitions", repetitions), ("--ranks", ranks), ("--jobs", jobs)):
        if value is not None and not value > 0:
            raise UsageError(f"{option} is {value:g}, expected a positive number")
    if figure is not None and rank_from_environment() == 0:
        check_plot_path(figure)
    if step in ("cells", "compile"):
        planned = planning.plan(_ranks(ranks, step), quick, chosen)
        if step == "cells":
            _name_cells(planned, as_json)
        else:
            _compile(planned, _ranks(ranks, step), scheduler, jobs, as_json)
        return
    if step == "measure":
        many = repetitions or (QUICK_REPETITIONS if quick else REPETITIONS)
        store, more = _measure(out, quick, chosen, many, scheduler, budget, anew, retry)
        if store is None:
            return
    else:
        if out is None:
            raise UsageError(f"{step} needs the file: --out scaling_8gpu.json")
        store, more = Store(out, read(out)), {}
        if step == "predict":
            _predict(store)
    _report(store, more, beside, as_json, figure)


def _ranks(ranks: int | None, step: str) -> int:
    if ranks is None:
        raise UsageError(f"{step} needs the number of GPUs: --ranks 8")
    return ranks


def _name_cells(planned: planning.Planned, as_json: bool) -> None:
    left_out = [{"cell": key, "why": why} for key, why in planned.left_out]
    if as_json:
        print(json.dumps({"cells": [cell.key for cell in planned.cells], "left_out": left_out}))
        return
    print("\n".join(cell.key for cell in planned.cells))
    for one in left_out:
        print(f"left out: {one['cell']}: {one['why']}")


def _compile(planned: planning.Planned, ranks: int, scheduler: str, jobs: int, as_json: bool) -> None:
    """Compile what is not in the cache (MOE_REF_CACHE)."""
    from moe_fast.compiler import cache_folder, check_compiler, compile_all

    check_compiler()
    shapes, names = planning.shapes(planned, ranks, scheduler), []
    for path in compile_all(shapes, jobs=jobs):
        names.append(path.name)
        say(f"[{len(names)}/{len(shapes)}] {path.name}")
    print(json.dumps({"folder": str(cache_folder()), "kernels": names}) if as_json else f"{len(names)} kernels")


def _measure(
    out: Path | None,
    quick: bool,
    figures: list[str],
    repetitions: int,
    scheduler: str,
    budget: float | None,
    anew: bool,
    retry: bool,
) -> tuple[Store | None, dict[str, Any]]:
    """(the file, None on other ranks than 0; what else there is to say: "left" and "given_up" cells)."""
    join()
    rank, ranks = place()
    planned = planning.plan(ranks, quick, figures)
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(planning.symmetric_bytes(planned, ranks)))
    store = None
    if rank == 0:
        path = out or Path(f"scaling_{ranks}gpu.json")
        store = Store.open(path, header(ranks, repetitions, scheduler), anew)
        store.expect(planned)
        if retry:
            store.put(interrupted={})
        say(f"{len(planned.cells)} cells, {len(store.done)} there, into {path}")
    measuring = Measuring(scheduler, repetitions)
    try:
        outcome = run(planned.cells, measuring, store, budget, agreement(), say if rank == 0 else lambda text: None)
    except Exception as error:
        if ranks == 1:
            raise
        # leaving in good order is collective, and the other ranks may wait for this one elsewhere: torchrun ends them
        code = exit_code(error, "--debug" in sys.argv)
        sys.stderr.flush()
        os._exit(code)
    measuring.close()
    for key in outcome.given_up if rank == 0 else ():
        say(f"passed over: {key} has ended two runs; --retry tries it again")
    return store, {"left": list(outcome.left), "given_up": list(outcome.given_up)}


def header(ranks: int, repetitions: int, scheduler: str) -> dict[str, Any]:
    """What a new file begins with."""
    title = f"Scaling run on {ranks} GPU{'s' * (ranks > 1)}"
    description = (
        "The papers' figures: latency, wire formats, utilisation, GPU operations and bytes, balance, training. ms per "
        "call, median of the slowest rank, all contestants of a cell interleaved in one run; tokens of each GPU."
    )
    return with_provenance(title, description, {"gpus": ranks, "repetitions": repetitions, "scheduler": scheduler})


def agreement() -> Callable[[Any], Any]:
    """A function that gives every rank what rank 0 has."""
    if not dist.is_initialized():
        return lambda value: value

    def agree(value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]

    return agree


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def _predict(store: Store) -> None:
    found = predicted(store.values)
    if found is None:
        raise UsageError(f"{store.path} has too few latency cells to calibrate the simulator on half of them")
    store.put(prediction=found)


def others(path: Path | None, beside: list[Path]) -> list[dict[str, Any]]:
    """The results to report with one: those that are named, or scaling_*gpu.json in the same folder."""
    if beside:
        return [read(one) for one in beside]
    folder = Path() if path is None else path.parent
    names = sorted(folder.glob("scaling_*gpu.json"))
    return [read(one) for one in names if path is None or one.resolve() != path.resolve()]


def _report(store: Store, more: dict[str, Any], beside: list[Path], as_json: bool, figure: Path | None) -> None:
    mine = store.values
    rest = others(store.path, beside)
    if not beside:
        rest = [one for one in rest if one["gpus"] != mine["gpus"]]
    results = ordered([mine, *rest])
    if figure is not None:
        plot(results, figure)
    if as_json:
        report = {name: rows(results) for name, (_, rows) in REPORTED.items()}
        report |= {"aims": aims(results), "papers": papers(results)}
        print(json.dumps({**mine, "report": report, **more}))
    else:
        print(render(results))
