"""The ladder of kernels without a GPU: what each level's machine code holds, the order of tasks, the reference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from optional import counted, cutlass_dsl

from moe_fast import compiler
from moe_fast.ladder.problem import (
    LEVELS,
    ROWS,
    SECOND,
    Problem,
    compile_level,
    fused_tasks,
    ordered_tasks,
    random_weights,
)
from moe_ref import MoEConfig, MoELayer

TILE_EXPERT = [0, 0, 0, 2, 3, 3]  # expert 1 has no row
# wgmma of a level: 4 a step, written out once per place in the code that multiplies
EXPECTED = {
    "plain": {"wgmma": 0, "tma_loads": 0},
    "wgmma": {"wgmma": 4, "tma_loads": 0},
    "tma": {"wgmma": 4, "tma_loads": 2},
    "pipeline": {"wgmma": 8, "tma_loads": 2},
    "persistent": {"wgmma": 8, "tma_loads": 2},
    "fused": {"wgmma": 16, "tma_loads": 4},
}
"""At least; the compiler may unroll."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LEVELS)
def test_level_compiles_for_hopper(name):
    """The instructions that a level is named after are there, and nothing spills."""
    cutlass_dsl()
    kernels = compile_level(name, 512, 768)
    assert len(kernels) == (1 if name == "fused" else 2)
    for kernel in kernels:
        cubin = compiler.cubin_of(kernel.dump_to_object("ladder"))
        assert compiler.resources(cubin)["stack_bytes"] == 0
        found = counted(compiler.instructions(cubin))
        assert found["spills"] == 0
        for what, least in EXPECTED[name].items():
            assert found[what] >= least if least else found[what] == 0, (what, found)


def test_lists_hold_every_task_once():
    both = fused_tasks(TILE_EXPERT, 60, 7)  # groups of four row tiles
    assert sorted(ordered_tasks(TILE_EXPERT, 5)) == [t << 8 | c for t in range(6) for c in range(5)]
    assert sorted(t for t in both if t < SECOND) == [t << 8 | c for t in range(6) for c in range(60)]
    assert sorted(t - SECOND for t in both if t >= SECOND) == [t << 8 | c for t in range(6) for c in range(7)]


def test_a_second_product_comes_after_its_inputs():
    """Else blocks that work through the list in order could wait for each other."""
    for columns0 in (1, 8, 60, 250):
        done = dict.fromkeys(range(6), 0)
        for task in fused_tasks(TILE_EXPERT, columns0, 3):
            row_tile = task % SECOND >> 8
            if task >= SECOND:
                assert done[row_tile] == columns0
            done[row_tile] += task < SECOND


def test_rows_of_a_column_stand_together():
    tasks = ordered_tasks(TILE_EXPERT, 2)
    assert [(t >> 8, t & 255) for t in tasks[:6]] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


def test_expected_is_the_layer():
    """What the levels are checked against, weighted and summed, is what the reference's layer computes."""
    config = MoEConfig(64, 128, experts=5, top_k=2, activation="relu", gated=False, dtype="bfloat16")
    layer = MoELayer(config)
    first, second = random_weights(5, 64, 128, "cpu")
    with torch.no_grad():
        layer.up_parameter.copy_(first)
        layer.down_proj.copy_(second)
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.no_grad():
        y, routing = layer(x), layer.gate(x)
    problem, place_SK = Problem.of_routes(x, routing.expert_SK, first, second)
    hidden, out = problem.expected()
    mine = (out[place_SK] * routing.weight_SK.unsqueeze(-1)).sum(1)
    assert float((mine - y.float()).norm() / mine.norm()) < 4e-3
    assert len(problem.rows_NH) % ROWS == 0
    assert len(problem.tile_expert) == len(problem.rows_NH) // ROWS
    assert problem.flops == 300 * 2 * 2 * 2 * 64 * 128
    padding = torch.ones(len(problem.rows_NH), dtype=torch.bool)
    padding[place_SK.flatten()] = False
    assert not hidden[padding].any()
    assert not out[padding].any()


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="hidden=100"):
        compile_level("plain", 100, 256)
    with pytest.raises(ValueError, match="no level 'fast'"):
        compile_level("fast", 256, 256)


def test_the_record_holds_every_level():
    """All eight levels and the library, each right, each rate that of its time."""
    path = Path(__file__).parents[2] / "docs" / "results" / "ladder_h200.json"
    found = json.loads(path.read_text())
    levels = found["levels"]
    assert [row["level"] for row in levels] == [*range(8), None, None]
    flops = 4 * found["rows"] * 2048 * 2048
    for row in levels:
        assert row["tflops"] == pytest.approx(flops / row["ms"]["median"] * 1e-9, abs=0.1)
        assert row["level"] is None or row["relative_error"] < 4e-3
    assert max(row["tflops"] for row in levels) == levels[-1]["tflops"], "faster than the library's dense products"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, "-m", "moe_fast.ladder"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("the ladder needs a CUDA device")
    assert "Traceback" not in done.stderr
