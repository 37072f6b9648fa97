"""Scaling runs: the papers' figures on any number of GPUs, one command, into one file that every run goes on with.

    python -m moe_fast.bench scaling compile --ranks 8                       its kernels ahead of time, without a GPU
    torchrun --nproc-per-node 8 -m moe_fast.bench scaling --budget 540 --out docs/results/scaling_8gpu.json
    python -m moe_fast.bench scaling predict --out docs/results/scaling_8gpu.json     the simulator on unseen cells
    python -m moe_fast.bench scaling show --out docs/results/scaling_8gpu.json --plot scaling.svg

Each finished cell is written at once, and the same command goes on where the last run ended. Overlap efficiency needs
the result of two GPUs, too (`--beside`, or in the same folder). Nothing is timed here in a way of its own: a cell calls
what the benchmark's other commands call.
"""

from moe_fast.bench.scaling.cells import Cell, Planned, plan, shapes, symmetric_bytes
from moe_fast.bench.scaling.runner import Outcome, Store, read, run

__all__ = ["Cell", "Outcome", "Planned", "Store", "plan", "read", "run", "shapes", "symmetric_bytes"]
