"""Benchmark: fused, unfused (eager and graph-captured) and the dense floor, the same inputs, interleaved in one run.

    python -m moe_fast.bench run --out docs/results/megakernel_bench_1gpu.json                      one GPU
    torchrun --nproc-per-node 2 -m moe_fast.bench run --out docs/results/megakernel_bench_2gpu.json
    python -m moe_fast.bench table docs/results/megakernel_bench_2gpu.json [--json]
    python -m moe_fast.bench dtypes | growth | blocks | predict      fp16 against bf16; cost against S and E; blocks of
                                                                     transformers; the simulator on unseen cells
    python -m moe_fast.bench schedulers | pairs | balance | transports | wire     variants of the kernel side by side
    python -m moe_fast.bench scaling              the papers' figures on any number of GPUs: `moe_fast.bench.scaling`

Also as `moe-ref bench ...`. Runs differ by a few per cent, and a GPU that has been busy is slower: compare within one
run.

"floor" is the same matrix products as dense GEMMs of the library, without routing or communication. How times are taken
is in `moe_fast.bench.measure`.
"""

from moe_fast.bench.commands import app
from moe_fast.bench.contestants import bench_cell, run_bench
from moe_fast.bench.layers import LAYERS, TARGETS, TOKENS
from moe_fast.bench.measure import Setup, floor_of, interleaved, place, set_up
from moe_fast.bench.process import PACKAGES
from moe_fast.bench.tables import render, with_targets

__all__ = [
    "LAYERS", "PACKAGES", "TARGETS", "TOKENS", "Setup", "app", "bench_cell", "floor_of", "interleaved", "place",
    "render", "run_bench", "set_up", "with_targets",
]  # fmt: skip
