"""The command `train`: a byte-level MoE model on real text, on P processes, with replicas and token scheduling."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table

from moe_ref.backends import default_dtype
from moe_ref.console import out, print_json
from moe_ref.environment import rank_from_environment, world_size_from_environment
from moe_ref.errors import UsageError
from moe_ref.limits import check_output_path, check_plot_path
from moe_ref.text import BUILT_IN
from moe_ref.train.balancing import MODES
from moe_ref.train.compare import check_machine, compare, plot_comparison, print_comparison
from moe_ref.train.job import train
from moe_ref.train.launch import launch, naming_lost_ranks
from moe_ref.train.loads import write_loads
from moe_ref.train.settings import TrainJob
from moe_ref.train.sharded import owned
from moe_ref.train.start import check
from moe_ref.train.summary import plot_run, summary
from moe_ref.world import DistributedWorld, SimulatedWorld, world_for


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("train")(train_command)


@dataclass(frozen=True)
class Task:
    """A job and what to do with its outcome; plain values, so that it can be handed to other processes.

    Attributes:
        modes: balancing modes to compare, empty for one run. machine: of the cost model.
    """

    job: TrainJob
    modes: tuple[str, ...] = ()
    machine: str = "h100-8"
    record: str | None = None
    plot: str | None = None
    as_json: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the inverse of `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Task:
        """Task from plain values."""
        return cls(**{**values, "job": TrainJob(**values["job"]), "modes": tuple(values["modes"])})


_JOB = {f.name: f.default for f in fields(TrainJob)}


def train_command(
    context_: typer.Context,
    ranks: int | None = typer.Option(None, help="Processes to start here (default 4); under torchrun its world size."),
    steps: int = typer.Option(_JOB["steps"], help="Optimiser steps in all."),
    sequences: int = typer.Option(_JOB["sequences"], help="Sequences of a global batch, dealt out to the ranks."),
    context: int = typer.Option(_JOB["context"], help="Bytes of a sequence; a byte is a token."),
    micro_batches: int = typer.Option(_JOB["micro_batches"], help="Parts of a batch whose gradients accumulate."),
    hidden: int = typer.Option(_JOB["hidden"], help="Width of the model."),
    intermediate: int = typer.Option(_JOB["intermediate"], help="Width of an expert."),
    experts: int = typer.Option(_JOB["experts"], help="Experts of each MoE layer."),
    top_k: int = typer.Option(_JOB["top_k"], help="Experts per token."),
    blocks: int = typer.Option(_JOB["blocks"], help="Blocks of the model; all but the first have an MoE."),
    replicas: int = typer.Option(_JOB["replicas"], help="Replicas of every expert."),
    balancing: str = typer.Option(_JOB["balancing"], help=f"One of {', '.join(MODES)}."),
    group_size: int | None = typer.Option(None, help="Ranks of a scheduling group (default: all)."),
    interval: int = typer.Option(_JOB["interval"], help="Steps between the placement manager's checks; 0: no manager."),
    always: bool = typer.Option(False, "--always", help="Re-place at every check, whether it pays or not."),
    balance_loss: float = typer.Option(_JOB["balance"], help="Weight of the balance loss; 0 leaves the gate its skew."),
    learning_rate: float = typer.Option(_JOB["learning_rate"], help="After warm-up, before the decay."),
    clip: float = typer.Option(_JOB["clip"], help="Largest norm of the gradient; every expert counts once."),
    sharded: bool = typer.Option(False, "--sharded", help="Divide optimiser states inside replica sets (ZeRO-1)."),
    recompute: bool = typer.Option(False, "--recompute", help="Recompute activations in the backward."),
    backend: str = typer.Option(_JOB["backend"], help="Who computes the MoE layers: ref, fused, unfused."),
    dtype: str | None = typer.Option(None, help="Of the MoE layers' weights and rows. Default: the backend's own."),
    text: str = typer.Option(_JOB["text"], help=f"Text to train on: {', '.join(BUILT_IN)}, or a file."),
    seed: int = typer.Option(0, help="Of weights and batches."),
    folder: Path | None = typer.Option(None, help="Where checkpoints go; none are written without it."),
    every: int = typer.Option(_JOB["every"], help="Steps between checkpoints."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the latest checkpoint, on any number of ranks."),
    timeout: float = typer.Option(_JOB["timeout_s"], help="Seconds that a rank waits for another before it gives up."),
    record: Path | None = typer.Option(None, help="Write loads per layer and step here (npz, for balance --loads)."),
    compare_: str | None = typer.Option(
        None, "--compare", help=f"Run several ways of balancing one after another, such as {','.join(MODES)}."
    ),
    machine: str = typer.Option("h100-8", help="Machine whose step times are modelled in a comparison."),
    plot: Path | None = typer.Option(None, help="Also draw the report into this file (png, svg, pdf)."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as one JSON object on one line."),
) -> None:
    """Train a small MoE language model on real text, on several processes.

    max_over_mean is the load of the busiest rank over the mean, averaged over steps and layers: as it ran (scheduled),
    and as the same batches would have run under plain expert parallelism with the same memory (plain).
    """
    job = TrainJob(
        steps, sequences, context, micro_batches, hidden, intermediate, experts, top_k, blocks, replicas, balancing,
        group_size, interval, always, learning_rate, clip, balance_loss, seed=seed, text=text, sharded=sharded,
        recompute=recompute, folder=None if folder is None else str(folder), every=every, resume=resume,
        timeout_s=timeout, backend=backend, dtype=dtype or default_dtype(backend),
    )  # fmt: skip
    modes = () if compare_ is None else tuple(mode.strip() for mode in compare_.split(","))
    task = Task(
        job, modes, machine, None if record is None else str(record), None if plot is None else str(plot), as_json
    )
    launched = world_size_from_environment()
    count = launched or (4 if ranks is None else ranks)
    _check(task, count)
    if folder is not None and not launched:
        with owned(folder, SimulatedWorld()):  # so that a folder of no use is known before any process is started
            pass
    if launched or count == 1:
        if ranks not in (None, count):
            raise UsageError(f"--ranks is {ranks}, but torchrun started {count} processes; leave --ranks out")
        run_here(task)
        return
    code = launch(task.to_dict(), count, debug=bool((context_.obj or {}).get("debug")))
    if code:
        raise typer.Exit(code)


def _check(task: Task, ranks: int) -> None:
    """What can be refused before any process is started."""
    job = task.job
    for mode in task.modes or (job.balancing,):
        check(replace(job, balancing=mode), ranks)
    if len(set(task.modes)) != len(task.modes):
        raise UsageError(f"--compare names a mode twice: {', '.join(task.modes)}")
    if task.modes and (job.folder or task.record):
        raise UsageError("--compare runs several times; leave out --folder, --resume and --record")
    if task.modes:
        check_machine(task.machine, ranks)
    if task.plot is not None:
        check_plot_path(Path(task.plot))
    if task.record is not None and Path(task.record).suffix != ".npz":
        raise UsageError(f"--record is {task.record}, expected a file that ends in .npz")
    if task.record is not None:
        check_output_path("--record", Path(task.record))


def run_here(task: Task) -> None:
    """Run a task as one rank of the world that the environment describes; rank 0 reports.

    Raises:
        CheckFailed: another rank is lost, or the numbers are not finite; UsageError: see `train`.
    """
    if world_size_from_environment() is not None:
        # PyTorch's first optimiser loads modules that keep a process group for good if there is one by then; gloo's
        # threads would then outlive the interpreter, and now and then abort it.
        torch.optim.SGD([torch.zeros(1)])
        DistributedWorld.from_environment(task.job.timeout_s)
    world, device = world_for(None, default=1)
    try:
        with naming_lost_ranks(world, "training"):
            if task.modes:
                values = compare(task.job, task.modes, task.machine, world, device)
            else:
                outcome, _ = train(task.job, world, device)
                values = summary(task.job, outcome, world)
    finally:
        # After an error the others may be gone: leaving must not wait for them.
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank_from_environment() != 0:
        return
    if task.record is not None:
        write_loads(Path(task.record), task.job, outcome)
    if task.plot is not None:
        (plot_comparison if task.modes else plot_run)(values, Path(task.plot))
    if task.as_json:
        print_json(values)
    elif task.modes:
        print_comparison(values, out)
    else:
        _print(values)


_LABELS = {
    "ranks": "ranks",
    "steps": "steps",
    "first_step": "went on from step",
    "balancing": "balancing",
    "replicas": "replicas of every expert",
    "experts": "experts of a layer",
    "layers": "MoE layers",
    "loss_first": "first loss, bits per byte",
    "loss_last": "last loss, bits per byte",
    "max_over_mean_plain": "max/mean load, had it been plain",
    "max_over_mean_scheduled": "max/mean load, as it ran",
    "sync_seconds": "gradient sums, s",
    "moves": "experts moved",
    "moved_bytes": "bytes moved",
    "seconds": "all steps, s",
}
"""What the report calls the values of `--json`."""


def _print(values: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False, title="Training", title_justify="left")
    table.add_column("what", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    for name, label in _LABELS.items():
        value = values[name]
        table.add_row(label, f"{value:.4g}" if isinstance(value, float) else str(value))
    out.print(table)
    out.print()
    stages = Table(box=None, pad_edge=False, show_header=False, title="ms per step", title_justify="left")
    stages.add_column("stage", overflow="fold")
    stages.add_column("ms", justify="right", no_wrap=True)
    for name, seconds in values["stage_seconds_per_step"].items():
        stages.add_row(name, f"{1e3 * seconds:.2f}")
    out.print(stages)
