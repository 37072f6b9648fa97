"""One cell on this process' GPU: what the benchmark's other commands measure, called for one size.

Letters: S tokens of a rank, P ranks.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist

from moe_fast.bench import balanced, variants
from moe_fast.bench.contestants import bench_cell, run_costs, run_trace
from moe_fast.bench.measure import Setup, place, set_up
from moe_fast.bench.scaling.cells import Cell, training_job
from moe_fast.engine_choice import close_engines
from moe_fast.launching import in_kernel
from moe_ref.train.job import training_steps
from moe_ref.world import DistributedWorld, SimulatedWorld

STEPS, FIRST_STEPS = 30, 10
"""Of a training run, and those that are not counted: engines are made, loads settle."""


class Measuring:
    """Measures cells; keeps the layer of the last latency cell, since the next one is often of the same.

    Args:
        scheduler: of the kernel. repetitions: timed calls of each contestant.
    """

    def __init__(self, scheduler: str, repetitions: int) -> None:
        self.scheduler, self.repetitions = scheduler, repetitions
        self._kept: tuple[tuple, Setup] | None = None

    def __call__(self, cell: Cell) -> dict[str, Any]:
        """The cell's row; collective."""
        if cell.figure not in ("latency", "costs"):
            self.close()
        torch.cuda.empty_cache()
        return getattr(self, f"_{cell.figure}")(cell)

    def close(self) -> None:
        """Free the layer that is kept; collective."""
        if self._kept is not None:
            self._kept[1].engine.heap.close()
            self._kept = None

    def _setup(self, cell: Cell) -> Setup:
        key = (cell.layer, cell.dtype, cell.most)
        if self._kept is None or self._kept[0] != key:
            self.close()
            torch.cuda.empty_cache()
            self._kept = (key, set_up(cell.config, cell.most, self.scheduler))
        return self._kept[1]

    def _about(self, cell: Cell) -> dict[str, Any]:
        """What the rows of most figures begin with."""
        about = {"layer": cell.layer, "dtype": cell.dtype, "gpus": place()[1], "tokens": cell.tokens}
        return {**about, "experts": cell.config.experts}

    def _latency(self, cell: Cell) -> dict[str, Any]:
        times = bench_cell(self._setup(cell), cell.tokens, self.repetitions, chains=True)
        return {**self._about(cell), "ms": times}

    def _costs(self, cell: Cell) -> dict[str, Any]:
        return {**self._about(cell), **run_costs(self._setup(cell), cell.tokens)}

    def _wire(self, cell: Cell) -> dict[str, Any]:
        (row,) = variants.run_wire(cell.layer, [cell.tokens], self.scheduler, self.repetitions)
        return {**self._about(cell), **row}

    def _timeline(self, cell: Cell) -> dict[str, Any]:
        return run_trace(cell.layer, cell.tokens, self.scheduler, None)

    def _balance(self, cell: Cell) -> dict[str, Any]:
        return balanced.run_skew(cell.layer, cell.tokens, cell.skew, self.scheduler, self.repetitions)

    def _training(self, cell: Cell) -> dict[str, Any]:
        _, ranks = place()
        world = DistributedWorld() if ranks > 1 else SimulatedWorld(1)
        job = training_job(ranks, cell.layer, cell.dtype, STEPS)
        steps = training_steps(job, world, torch.device("cuda", torch.cuda.current_device()))
        outcome, training = next(steps)
        by_kernel = cell.dtype == "fused" and all(map(in_kernel, training.layers.values()))
        for _ in steps:
            pass
        close_engines()
        median = torch.tensor(statistics.median(outcome.step_seconds[FIRST_STEPS:]) * 1e3, device="cuda")
        if ranks > 1:
            dist.all_reduce(median, op=dist.ReduceOp.MAX)
        return {
            "backend": cell.dtype, "balancing": cell.layer, "planned": "in the kernel" if by_kernel else "on the host",
            "gpus": ranks, "tokens": job.sequences * job.context // ranks, "ms": round(float(median), 3),
            "max_over_mean_load": round(statistics.fmean(statistics.fmean(r) for r in outcome.scheduled_TL), 4),
            "loss": [round(outcome.losses[0], 4), round(outcome.losses[-1], 4)],
        }  # fmt: skip
