"""Ways of balancing side by side: the experiment of FineMoE's figures 7 and 9 at laptop size.

Every mode trains the same model on the same batches with the same seeds; the modes take turns step by step, so that
what else the machine does meets all of them. Two kinds of time are reported:

measured    per stage of the MoE layers, forward, summed over layers, slowest rank, on this machine. Where processes
            outnumber cores they take turns, and a rank that waits costs nothing: balance can't show in these times.
modelled    the batches that were routed here, scaled up to `GPU_LAYER` and run through the cost model of a GPU machine
            (`moe_ref.runtime`, fitted to recorded runs) as a bulk-synchronous chain. Of a training step: products
            three times (forward, and twice the work backward), dispatch and combine twice, the rest once.

The paper's gains are end to end (attention included) over Megatron-LM on 32 H100; ours are of the MoE layers alone.

Letters: P ranks, E experts, K choices per token, S tokens of a rank.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from moe_ref.balance import schedule
from moe_ref.errors import UsageError
from moe_ref.placement import Placement
from moe_ref.runtime.callplan import make_call
from moe_ref.runtime.chains import bulk
from moe_ref.runtime.machine import Machine
from moe_ref.runtime.machine import machine as machine_named
from moe_ref.runtime.workload import Workload
from moe_ref.train.balancing import make_planner
from moe_ref.train.job import training_steps
from moe_ref.train.outcome import Outcome
from moe_ref.train.progress import bar
from moe_ref.train.settings import TrainJob
from moe_ref.train.summary import summary
from moe_ref.world import World

PAPER = {"mean_gain_percent": 36.9, "best_gain_percent": 47.6, "baseline": "Megatron-LM", "what": "end to end, 32 H100"}
"""What FineMoE reports over plain expert parallelism."""

GPU_LAYER = {"tokens": 8192, "hidden": 2048, "intermediate": 2048, "gated": True, "element_size": 2}
"""Layer of the modelled machine; tokens per rank, bf16."""

MODELLED_STEPS = 6
"""Steps whose batches are modelled, spread evenly over the run."""

_LAST = {
    "gate": ("count rows", "counts"),
    "dispatch": ("rows by expert",),
    "compute": ("product 1",),
    "combine": ("weigh and sum",),
}
"""Operations of the modelled chain that a stage ends with."""

_TIMES_PER_STEP = {"gate": 1, "dispatch": 2, "compute": 3, "combine": 2, "scheduling": 1, "sync": 1}
_MEASURED = {"gate": ("gate", "counts"), "dispatch": ("dispatch",), "compute": ("experts",),
             "combine": ("return", "combine"), "scheduling": ("plan",), "sync": ("sync",)}  # fmt: skip


def compare(
    job: TrainJob, modes: tuple[str, ...], machine: str, world: World, device: torch.device | str
) -> dict[str, Any]:
    """Train once per mode; every rank calls it, all get the same values.

    Raises:
        UsageError: an unknown machine, or one with fewer GPUs than ranks; and as `train`.
    """
    gpu = check_machine(machine, world.num_ranks)
    runs = {mode: training_steps(dataclasses.replace(job, balancing=mode), world, device) for mode in modes}
    outcomes = {mode: next(run)[0] for mode, run in runs.items()}
    with bar(0, job.steps, world.local_ranks[0]) as show:
        for step in range(job.steps):
            for mode, run in runs.items():
                next(run)
                show(step + 1, f"{mode}: {outcomes[mode].losses[-1]:.3f} bits/byte")
    step_seconds = {mode: _slowest_steps(world, outcome) for mode, outcome in outcomes.items()}
    results: dict[str, Any] = {}
    for mode, outcome in outcomes.items():
        values = summary(job, outcome, world)
        seconds = values["stage_seconds_per_step"]
        measured = {stage: sum(seconds.get(n, 0.0) for n in names) for stage, names in _MEASURED.items()}
        modelled = _modelled(job, mode, outcome, gpu, world.num_ranks)
        results[mode] = {
            "loss_last": values["loss_last"],
            "max_over_mean": values["max_over_mean_scheduled"],
            "moves": values["moves"],
            "seconds_per_step": float(np.median(step_seconds[mode])),
            "measured_s": measured,
            "modelled_us": modelled,
            "modelled_step_us": sum(_TIMES_PER_STEP[stage] * us for stage, us in modelled.items()),
        }
    if "plain" in results:
        plain = results["plain"]
        for mode, values in results.items():
            values["modelled_gain_percent"] = 100 * (plain["modelled_step_us"] / values["modelled_step_us"] - 1)
            paired = step_seconds["plain"] / step_seconds[mode]
            values["measured_gain_percent"] = 100 * (float(np.median(paired)) - 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "ranks": world.num_ranks,
        "steps": job.steps,
        "experts": job.experts,
        "replicas": job.replicas,
        "cores": cores,
        "measured_shows_balance": world.num_ranks <= cores,
        "machine": machine,
        "gpu_layer": GPU_LAYER,
        "modes": results,
        "paper": PAPER,
    }


def check_machine(name: str, ranks: int) -> Machine:
    """The machine of this name; UsageError if there is none, or if it has fewer GPUs than ranks."""
    gpu = machine_named(name)
    if ranks > gpu.gpus:
        raise UsageError(f"{ranks} ranks were asked for, but --machine {name} has {gpu.gpus} GPUs")
    return gpu


def _slowest_steps(world: World, outcome: Outcome) -> np.ndarray:
    """Seconds of each step on the slowest rank, [T]; every rank calls it."""
    mine_T = np.round(1e9 * np.array(outcome.step_seconds)).astype(np.int64)
    return world.gather(np.stack([mine_T] * len(world.local_ranks))).max(axis=0) / 1e9


def _modelled(job: TrainJob, mode: str, outcome: Outcome, gpu: Machine, ranks: int) -> dict[str, float]:
    """Mean forward time per stage and layer of this run's batches on a GPU machine; us.

    Scheduling is measured, not modelled: it runs on the CPU there, too. It counts in full, as if nothing hid it.
    """
    work = Workload(ranks=ranks, experts=job.experts, top_k=job.top_k, **GPU_LAYER)
    planner = make_planner(mode, ranks, job.replicas, job.group_size)
    steps = np.unique(np.linspace(0, len(outcome.counts_TLPE) - 1, MODELLED_STEPS).astype(int))
    total = dict.fromkeys(_TIMES_PER_STEP, 0.0)
    batches = [pair for t in steps for pair in zip(outcome.counts_TLPE[t], outcome.placement_TL[t], strict=True)]
    solves = []
    for counts_PE, placement in batches:
        scaled_PE = _scaled(counts_PE, work.tokens * job.top_k)
        plan = planner(scaled_PE, placement)
        if mode == "scheduled":
            schedule(scaled_PE, placement, "flow_compiled", group_size=job.group_size)  # the first call compiles
            start = time.perf_counter()
            schedule(scaled_PE, placement, "flow_compiled", group_size=job.group_size)
            solves.append(1e6 * (time.perf_counter() - start))
        call = make_call([_routes(row, job.top_k) for row in scaled_PE], placement, work.shape, plan)
        chain = bulk(call, gpu, work, record=True, grouped=True)
        before = 0.0
        for stage, names in _LAST.items():
            end = max(i.start_us + i.duration_us for i in chain.intervals if i.name in names)
            total[stage] += end - before
            before = end
        total["sync"] += _sync_us(work, placement, gpu)
    mean = {stage: us / len(batches) for stage, us in total.items()}
    return mean | {"scheduling": float(np.median(solves)) if solves else 0.0}


def _scaled(counts_PE: np.ndarray, rows: int) -> np.ndarray:
    """The same shares with `rows` rows per rank, int64; remainders go to the largest experts."""
    scaled_PE = counts_PE * rows // np.maximum(counts_PE.sum(axis=1, keepdims=True), 1)
    for row, missing in zip(scaled_PE, rows - scaled_PE.sum(axis=1), strict=True):
        row[row.argmax()] += missing
    return scaled_PE


def _routes(rows_E: np.ndarray, top_k: int) -> np.ndarray:
    """Routes of one rank with these counts, int64 [S, K]; who goes with whom doesn't matter for time."""
    return np.repeat(np.arange(len(rows_E)), rows_E).reshape(top_k, -1).T


def _sync_us(work: Workload, placement: Placement, gpu: Machine) -> float:
    """Gradient exchange of the busiest rank: each of d replicas sends 2 (d - 1) / d of an expert's bf16 gradients."""
    bytes_ = work.element_size * work.hidden * (work.shape.up_columns + work.intermediate)
    counts_E = placement.replica_counts
    sent = [sum(2 * (counts_E[e] - 1) / counts_E[e] for e in held) * bytes_ for held in placement.experts_of_rank]
    return gpu.collective_us + 1e6 * max(sent) / gpu.collective_bytes_per_s


def print_comparison(values: dict[str, Any], out: Console) -> None:
    """The values as tables."""
    for kind, unit, factor in (("measured_s", "ms, measured here", 1e3), ("modelled_us", "us on GPUs, modelled", 1.0)):
        title = f"Forward per step, {unit}; gain over plain"
        if kind == "modelled_us":
            title = f"Forward per layer, {unit} ({values['machine']}); gain over plain"
        out.print(title, style="bold", highlight=False)  # a table's own title would be as narrow as the table
        table = Table(box=None, pad_edge=False)
        table.add_column("", overflow="fold")
        for mode in values["modes"]:
            table.add_column(mode, justify="right", no_wrap=True)
        gain = "measured_gain_percent" if kind == "measured_s" else "modelled_gain_percent"
        results = values["modes"].values()
        for stage in _TIMES_PER_STEP:
            table.add_row(stage, *(f"{factor * result[kind][stage]:.1f}" for result in results))
        table.add_row("max/mean", *(f"{result['max_over_mean']:.3f}" for result in results))
        table.add_row("gain", *(f"{result[gain]:+.1f} %" if gain in result else "-" for result in results))
        out.print(table)
        out.print()
    out.print(
        f"Paper: {PAPER['mean_gain_percent']} % on average, {PAPER['best_gain_percent']} % at best ({PAPER['what']})."
    )
    if not values["measured_shows_balance"]:
        out.print(f"{values['ranks']} processes share {values['cores']} cores: measured times can't show balance.")


def plot_comparison(values: dict[str, Any], path: Path) -> None:
    """Bars per stage: measured, and modelled (as in the paper's figure 9), with the gains (figure 7)."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    modes = list(values["modes"])
    for axis, kind, factor, label in (
        (axes[0], "measured_s", 1e3, "ms per step, forward, measured"),
        (axes[1], "modelled_us", 1.0, f"us per layer, forward, modelled ({values['machine']})"),
    ):
        bottom = np.zeros(len(modes))
        for stage in _TIMES_PER_STEP:
            height = np.array([factor * values["modes"][mode][kind][stage] for mode in modes])
            axis.bar(modes, height, bottom=bottom, label=stage)
            bottom += height
        axis.set(ylabel=label)
    axes[0].legend(fontsize="small")
    gains = [values["modes"][mode].get("modelled_gain_percent", 0.0) for mode in modes]
    axes[2].bar(modes, gains)
    for name, gain in (("paper, mean", PAPER["mean_gain_percent"]), ("paper, best", PAPER["best_gain_percent"])):
        axes[2].axhline(float(gain), linestyle="--", linewidth=1, color="gray")
        axes[2].annotate(name, (0, float(gain)), fontsize="small", va="bottom")
    axes[2].set(ylabel="gain over plain, %", title="MoE layers, modelled")
    figure.savefig(path, dpi=150)
    plt.close(figure)
