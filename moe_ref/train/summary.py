"""What a training run reports: the values of `--json`, and a picture.

Letters: T steps, L MoE layers.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from moe_ref.train.outcome import Outcome
from moe_ref.train.settings import TrainJob
from moe_ref.world import World


def slowest(world: World, seconds: dict[str, float]) -> dict[str, float]:
    """Per name the largest value of any process; every rank calls it."""
    names = sorted(seconds)
    mine = np.array([[round(1e9 * seconds[name]) for name in names]] * len(world.local_ranks))
    largest = world.gather(mine).max(axis=0)
    return {name: int(value) / 1e9 for name, value in zip(names, largest, strict=True)}


def summary(job: TrainJob, outcome: Outcome, world: World) -> dict[str, Any]:
    """The report of a run; every rank calls it, all get the same.

    Times are those of the slowest rank. `sync_seconds`: gradient sums, and what a sharded optimiser exchanges.
    """
    steps = len(outcome.losses)
    times = slowest(world, {**outcome.stage_seconds, "sync": outcome.sync_seconds, "all": sum(outcome.step_seconds)})
    return {
        "ranks": world.num_ranks,
        "steps": job.steps,
        "first_step": outcome.first_step,
        "balancing": job.balancing,
        "replicas": job.replicas,
        "experts": job.experts,
        "layers": len(outcome.load_TLE[0]),
        "loss_first": outcome.losses[0],
        "loss_last": outcome.losses[-1],
        "losses": outcome.losses,
        "max_over_mean_plain": float(np.mean(outcome.plain_TL)),
        "max_over_mean_scheduled": float(np.mean(outcome.scheduled_TL)),
        "max_over_mean_per_layer": np.mean(outcome.scheduled_TL, axis=0).tolist(),
        "sync_seconds": times["sync"],
        "moves": outcome.moves,
        "moved_bytes": outcome.moved_bytes,
        "decisions": outcome.decisions,
        "seconds": times["all"],
        "stage_seconds_per_step": {n: times[n] / steps for n in [*outcome.stage_seconds, "sync"]},
        "job": asdict(job),
    }


def plot_run(values: dict[str, Any], path: Path) -> None:
    """Loss per step, and where a step's time goes."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    first = values["first_step"]
    left.plot(range(first + 1, first + 1 + len(values["losses"])), values["losses"])
    left.set(xlabel="step", ylabel="bits per byte", title="Cross entropy of the global batch")
    stages = values["stage_seconds_per_step"]
    right.barh(list(stages), [1e3 * seconds for seconds in stages.values()])
    right.invert_yaxis()
    right.set(xlabel="ms per step, slowest rank", title=f"{values['ranks']} ranks, {values['balancing']}")
    figure.savefig(path, dpi=150)
    plt.close(figure)
