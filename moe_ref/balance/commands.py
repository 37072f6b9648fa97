"""The command `balance`: token scheduling on modelled or real loads. (`place` lives beside the placements.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from moe_ref.balance.loads import LoadModel, as_prediction, read_loads, split_evenly
from moe_ref.balance.lp import FORMULATIONS
from moe_ref.balance.study import before_and_after, real_study, trade_off
from moe_ref.balance.sweep import skew_sweep
from moe_ref.balance.timing import SOLVERS, time_overlap, time_solvers
from moe_ref.console import err, out, print_json
from moe_ref.errors import CheckFailed, UsageError
from moe_ref.limits import check_plot_path
from moe_ref.placement import names
from moe_ref.placement.symmetric import Construction


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(balance)


def balance(
    ranks: int | None = typer.Option(None, help="Ranks that schedule together (default: the placement file's, or 8)."),
    experts: int | None = typer.Option(None, help="Experts (default: the file's, or 32)."),
    replicas: int = typer.Option(2, help="Replicas of every expert (memory: experts x replicas slots in all)."),
    zipf: float = typer.Option(0.5, help="Skew s of the modelled loads; 0 is uniform."),
    noise: float = typer.Option(0.2, help="Log-normal noise of the modelled popularity from step to step."),
    rows: int = typer.Option(8192, help="Modelled rows (token copies) per rank."),
    steps: int = typer.Option(50, help="Micro-batches to balance, and to time."),
    solver: str = typer.Option("flow_compiled", help=f"Which to time: {', '.join(SOLVERS)}, or all."),
    formulation: str = typer.Option("eliminated", help=f"Of the linear program: {' or '.join(FORMULATIONS)}."),
    placement: str = typer.Option("symmetric", help=f"{', '.join(names.NAMES)}, or a file that `place` wrote."),
    loads: Path | None = typer.Option(
        None, help="Real loads per step and expert instead of the model: npz, csv, json."
    ),
    sweep: bool = typer.Option(False, "--sweep", help="Also sweep the skew, with all rivals (the paper's Figure 8)."),
    overlap: bool = typer.Option(False, "--overlap", help="Also measure what dispatch waits for the plan."),
    nodes: int | None = typer.Option(None, help="Also weigh balance against communication between so many nodes."),
    interval: int = typer.Option(50, help="With --loads: steps between the checks of the adaptive manager."),
    seed: int = typer.Option(0, help="Of the modelled loads."),
    plot: Path | None = typer.Option(None, help="Also draw the report into this file (png, svg, pdf)."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object on one line."),
) -> None:
    """Balance loads over expert replicas: before and after per rank, solver times, rivals.

    A batch is perfect if no rank computes more than the mean, rounded up, and exact if the maximum load is proven to be
    the smallest possible.
    """
    for name, value in (("--ranks", ranks), ("--experts", experts), ("--replicas", replicas)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}, expected at least 1")
    _check(zipf, noise, rows, steps, solver, formulation, interval, seed)
    if plot is not None:
        check_plot_path(plot)
    real = None if loads is None else read_loads(loads)
    if real is not None and experts not in (None, real.num_experts):
        raise UsageError(f"--experts is {experts}, but {loads} has loads of {real.num_experts} experts; leave it out")
    num_experts = real.num_experts if real is not None else experts
    model = None if real is not None else LoadModel(_or(ranks, 8), _or(num_experts, 32), zipf, noise, rows, seed)
    predicted = as_prediction(model.popularity()) if model else _prediction(real)
    made = _placement(placement, ranks, num_experts, replicas, predicted)
    if model is not None:
        model = LoadModel(made.placement.num_ranks, made.placement.num_experts, zipf, noise, rows, seed)
    values: dict[str, Any] = {
        "ranks": made.placement.num_ranks,
        "experts": made.placement.num_experts,
        "replicas": replicas,
        "placement": placement,
        "recipe": made.recipe,
        "slots_per_rank": [len(held) for held in made.placement.experts_of_rank],
        "seed": seed,
    }
    if sweep and values["experts"] * replicas % values["ranks"]:
        raise UsageError(
            f"--sweep compares rivals whose slots are all full, but {values['experts']} experts x {replicas} replicas "
            f"is no multiple of {values['ranks']} ranks"
        )
    if nodes is not None and (nodes < 1 or values["ranks"] % nodes):
        raise UsageError(f"--nodes is {nodes}, expected a divisor of {values['ranks']} ranks")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("balancing")

        def show(what: object) -> None:
            progress.update(task, description=escape(str(what)))

        if model is not None:
            values |= {"zipf": zipf, "noise": noise, "rows_per_rank": rows, "steps": steps}
            batches = list(model.batches(steps))
            values |= before_and_after(batches, made.placement, replicas)
        else:
            assert real is not None
            values |= {"loads": str(loads), "series": len(real.load_NTE), "steps": real.load_NTE.shape[1]}
            values |= real_study(real, made.placement, replicas, interval, lambda stage: show(f"{stage}: done"))
            flat = real.load_NTE.reshape(-1, real.num_experts)[:steps]
            batches = [split_evenly(load_E, made.placement.num_ranks) for load_E in flat]
        show("timing")
        solvers = SOLVERS if solver == "all" else (solver,)
        values["solvers"] = time_solvers(
            batches, made.placement, solvers, formulation, lambda name: show(f"timed {name}")
        )
        if overlap:
            show("timing the overlap")
            values["overlap"] = time_overlap(batches, made.placement, seed)
            values["visible_us"] = values["overlap"]["visible_us"]
        if nodes is not None:
            show("balance against communication")
            values["trade_off"] = trade_off(batches[0], made.placement, made.placement.num_ranks // nodes)
        if sweep:
            values["sweep"] = skew_sweep(
                made.placement.num_ranks,
                made.placement.num_experts,
                replicas,
                steps,
                noise=noise,
                rows_per_rank=rows,
                seed=seed,
                progress=lambda skew: show(f"skew {skew}: done"),
            )
    if plot is not None:
        from moe_ref.balance.plots import plot_balance  # matplotlib takes a second to load

        plot_balance(values, plot)
    if as_json:
        print_json(values)
    else:
        _print(values)
    inexact = [name for name, timed in values["solvers"].items() if not timed["exact"]]
    if values["exact_share"] < 1.0 or inexact:
        raise CheckFailed(f"maximum load above the proven bound: {', '.join(inexact) or 'flow_compiled'}")


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _check(
    zipf: float, noise: float, rows: int, steps: int, solver: str, formulation: str, interval: int, seed: int
) -> None:
    for name, value in (("--zipf", zipf), ("--noise", noise)):
        if not (np.isfinite(value) and 0 <= value <= 20):
            raise UsageError(f"{name} is {value}, expected a number from 0 to 20")
    if rows < 0 or rows > 2**31:
        raise UsageError(f"--rows is {rows}, expected 0 to 2^31")
    for name, value in (("--steps", steps), ("--interval", interval)):
        if value < 1:
            raise UsageError(f"{name} is {value}, expected at least 1")
    if seed < 0:
        raise UsageError(f"--seed is {seed}, expected at least 0")
    if solver not in (*SOLVERS, "all"):
        raise UsageError(f"unknown --solver {solver!r}, expected one of {', '.join(SOLVERS)}, all")
    if formulation not in FORMULATIONS:
        raise UsageError(f"unknown --formulation {formulation!r}, expected one of {', '.join(FORMULATIONS)}")


def _prediction(real: Any) -> np.ndarray:
    """What an asymmetric placement for real loads is made for: their mean over everything."""
    return real.load_NTE.sum(axis=(0, 1))


def _placement(name: str, ranks: int | None, experts: int | None, replicas: int, predicted: np.ndarray) -> Construction:
    """A placement by name, or from a file whose sizes then hold."""
    if name in names.NAMES:
        return names.by_name(name, _or(ranks, 8), _or(experts, 32), replicas, predicted)
    if not Path(name).exists():
        raise UsageError(f"--placement {name} is no file, and none of {', '.join(names.NAMES)}")
    loaded = names.load(name)
    for option, given, has in (("ranks", ranks, loaded.num_ranks), ("experts", experts, loaded.num_experts)):
        if given not in (None, has):
            raise UsageError(f"{name} is a placement for {has} {option}, but {given} are asked for")
    return Construction(loaded, f"file {name}")


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _print(values: dict[str, Any]) -> None:
    out.print(f"[bold]placement[/]  {escape(values['placement'])}: {escape(values['recipe'])}")
    table = _table("Maximum over mean load", "", "mean", "p99", "worst")
    for name, label in (("before", "plain expert parallelism"), ("after", "scheduled")):
        table.add_row(label, *(f"{values[name][key]:.4f}" for key in ("mean", "p99", "worst")))
    out.print(table)
    out.print(
        f"perfect in {values['perfect_share']:.1%} of batches, proven optimal in {values['exact_share']:.1%}, "
        f"{values['local_share']:.1%} of copies local"
    )
    table = _table("Mean rows per rank", "rank", "plain", "scheduled")
    for rank, (a, b) in enumerate(zip(values["before"]["rank_loads"], values["after"]["rank_loads"], strict=True)):
        table.add_row(str(rank), f"{a:,.1f}", f"{b:,.1f}")
    out.print(table)
    table = _table("Microseconds per plan", "solver", "loads", "p95", "with quotas", "p95", "max/mean", "exact")
    for name, t in values["solvers"].items():
        times = (f"{t[key]:.0f}" for key in ("median_us", "p95_us", "quota_median_us", "quota_p95_us"))
        table.add_row(name, *times, f"{t['max_over_mean']:.4f}", "yes" if t["exact"] else "NO")
    out.print(table)
    if "overlap" in values:
        v = values["overlap"]
        out.print(
            f"dispatch waits {v['overlapped']['visible_us']:.0f} us beyond its permutation of "
            f"{v['permutation_us']:.0f} us ({v['serial']['visible_us']:.0f} without overlap, "
            f"{v['pipelined']['visible_us']:.0f} pipelined)"
        )
    if "trade_off" in values:
        keys = ("alpha", "compute", "communication", "max_load", "plan_communication", "local_share")
        labels = ("max load", "received", "in whole rows", "received", "local")
        table = _table("Balance against communication of the first batch, in mean loads", "alpha", *labels)
        for point in values["trade_off"]:
            table.add_row(f"{point['alpha']:g}", *(f"{point[key]:.4f}" for key in keys[1:]))
        out.print(table)
    if "across_domains" in values:
        v = values["across_domains"]
        out.print(f"planned on one domain, run on another: mean {v['mean']:.4f}, worst {v['worst']:.3f}")
    for name, label in (("adaptive", "adaptive manager"), ("every_interval", "re-placed at every interval")):
        if name in values:
            v = values[name]
            if not v["decisions"]:
                steps = len(v["ratio_per_step"])
                out.print(f"{label}: not checked, every {v['interval']} steps is too rare for {steps}; see --interval")
                continue
            out.print(
                f"{label}: {v['moves']} moves, {v['bytes'] / 1e9:.2f} GB, {v['cost_s']:.3f} s = "
                f"{v['share_of_step_time']:.3%} of the experts' time; mean ratio {np.mean(v['ratio_per_step']):.4f}"
            )
    if "sweep" in values:
        columns = [key for key in values["sweep"][0] if key != "zipf"]
        table = _table("Maximum over mean load by skew", "rival", *(f"{row['zipf']:g}" for row in values["sweep"]))
        for key in columns:
            label = key.replace("_style", "-style").replace("_stale", ", stale")
            table.add_row(label, *(f"{row[key]['mean']:.2f}" for row in values["sweep"]))
        out.print(table)
