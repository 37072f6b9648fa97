"""The differential matrix: a pairwise covering of its axes, small enough to run in a minute.

Axes that decide the compiled kernel (activation, dtype, K, E, scheduler, gate flavour) make SHAPES; every shape then
runs all S with a routing each, so that over the shapes each S meets each routing. Nothing of that recompiles.
"""

from __future__ import annotations

import itertools

from harness import ROUTINGS, Case

from moe_ref.train.job import TrainJob

ACTIVATIONS = (("relu", False), ("gelu", False), ("silu", True), ("gelu", True), ("relu", True), ("silu", False))
DTYPES = ("bfloat16", "float16")
TOP_K = (1, 2, 4, 8)
EXPERTS = (8, 60, 64, 128, 256)
SCHEDULERS = ("spare_warps", "os_block", "tickets")
GATES = (("softmax", True, 1.0, False), ("sigmoid", True, 2.5, True), ("softmax", False, 1.0, False))
SIZES = ((512, 256), (1024, 384), (256, 512))
TOKENS = (0, 1, 45, 127, 128, 129, 1000, 4096)
TRAINED = tuple(TrainJob(backend="fused", dtype=dtype, balance=0.0).model.moe for dtype in ("bfloat16", "float16"))
"""MoE layers of a training run with its default sizes."""


def pairwise(axes: list[tuple]) -> list[tuple]:
    """Rows that contain every pair of values of every two axes (greedy, deterministic)."""
    left = {
        (i, a, j, b)
        for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2)
        for a in range(len(first))
        for b in range(len(second))
    }
    rows = []
    while left:
        best, gain = None, -1
        seed = min(left)
        for trial in range(60):
            row = [(trial * (2 * i + 3) + len(rows) * (i + 1)) % len(axis) for i, axis in enumerate(axes)]
            row[seed[0]], row[seed[2]] = seed[1], seed[3]
            covers = sum((i, row[i], j, row[j]) in left for i, j in itertools.combinations(range(len(axes)), 2))
            if covers > gain:
                best, gain = row, covers
        left -= {(i, best[i], j, best[j]) for i, j in itertools.combinations(range(len(axes)), 2)}
        rows.append(tuple(axis[v] for axis, v in zip(axes, best, strict=True)))
    return rows


SHAPES = pairwise([ACTIVATIONS, DTYPES, TOP_K, EXPERTS, SCHEDULERS, GATES, SIZES])


def cases_of(number: int) -> list[Case]:
    """Every S of shape `number`, each with a routing, and a different S on the second rank."""
    (activation, gated), dtype, top_k, experts, scheduler, gate, (hidden, intermediate) = SHAPES[number]
    scoring, renormalize, scale, bias = gate
    out = []
    for i, tokens in enumerate(TOKENS):
        other = TOKENS[(i + number) % len(TOKENS)]
        out.append(
            Case(
                hidden, intermediate, experts, top_k, activation, gated, dtype, (tokens, other),
                ROUTINGS[(i + number) % len(ROUTINGS)], scheduler, scoring, renormalize, scale, bias,
            )
        )  # fmt: skip
    return out


SMALL = Case(512, 256, 8, 2, "silu", True, "bfloat16", (1000, 129), scheduler="spare_warps")
QWEN3 = Case(2048, 768, 128, 8, "silu", True, "bfloat16", (1000, 4096), scheduler="spare_warps")
TINY = Case(128, 64, 32, 4, "silu", True, "bfloat16", (300, 77), scheduler="spare_warps")
FULL = Case(512, 256, 8, 8, "silu", True, "bfloat16", (256,), "uniform", scheduler="spare_warps", max_tokens=256)
SPECIAL = [SMALL, QWEN3, TINY]
UNEVEN = [
    Case(512, 256, 5, 2, "silu", True, "bfloat16", (1000, 1), scheduler="spare_warps"),
    Case(256, 512, 61, 4, "gelu", False, "float16", (45, 129), scheduler="os_block"),
    Case(1024, 384, 127, 8, "relu", False, "bfloat16", (3, 700), scheduler="tickets"),
    Case(512, 256, 3, 1, "silu", True, "bfloat16", (129, 0), scheduler="spare_warps"),
]
"""E is no multiple of two ranks, and smaller or larger than S."""
LARGE = Case(
    4096, 2048, 16, 8, "silu", True, "bfloat16", (131_072,), scheduler="spare_warps", max_tokens=131_072
)  # fmt: skip
"""Rows, hidden activations and returned rows of more than 2^31 elements each, both staging sides apart by more."""


def all_shapes(ranks: int, trace: bool = True) -> list:
    """Every kernel the GPU tests need, for compiling ahead of time."""
    from dataclasses import replace

    from moe_fast.kernel.shapes import SCHEDULERS, KernelShape

    cases = [cases_of(n)[0] for n in range(len(SHAPES))]
    cases += [replace(c, scheduler=s) for c in (SMALL, QWEN3) for s in SCHEDULERS] + [TINY, FULL, *UNEVEN]
    cases += [LARGE] if ranks == 1 else []
    shapes = [KernelShape.from_config(c.config, ranks, c.scheduler) for c in cases]
    layers = (
        Case(512, 256, 8, 2, "silu", True, "bfloat16", (0,)),
        Case(512, 256, 8, 2, "silu", False, "float16", (0,)),
    )
    shapes += [KernelShape.from_config(c.config, ranks, "spare_warps") for c in layers]
    shapes += [KernelShape.from_config(config, ranks, "spare_warps") for config in TRAINED]
    shapes += [KernelShape.from_config(QWEN3.config, ranks, s, trace=True) for s in SCHEDULERS] if trace else []
    return list(dict.fromkeys(shapes))
