"""Time and peak memory of the reference against a plain per-expert loop, as ratios of one run.

    pytest tests/benchmarks -s

S = 2048, H = 512, D = 1024, E = 32, K = 4, fp32, gated, all cores; P = 1 and P = 4 (512 tokens per rank) with rows
through the heap, same routing, gate left out on both sides. Time: shortest of 25 interleaved repetitions (on a shared
machine noise only adds). Memory: peak resident set of a fresh process during three forwards, weights included; beside
it what the forwards added.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from moe_ref import MoEConfig, MoELayer, Routing, cases

CONFIG = MoEConfig(hidden=512, intermediate=1024, experts=32, top_k=4)
TOKENS = 2048
LIMITS = {"P=1": 1.2, "P=4": 1.6}
MEMORY_LIMIT = 2.0


def per_expert_loop(x_SH: torch.Tensor, routing: Routing, layer: MoELayer) -> torch.Tensor:
    """What one would write first."""
    y_SH = torch.zeros_like(x_SH)
    for e in range(layer.config.experts):
        token, choice = (routing.expert_SK == e).nonzero(as_tuple=True)
        if len(token):
            gate, up = F.linear(x_SH[token], layer.gate_up_proj[e]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, layer.down_proj[e])
            y_SH.index_add_(0, token, out * routing.weight_SK[token, choice, None])
    return y_SH


def job(name: str):
    """The forward of that name as a function without arguments, on all cores (tests use one thread otherwise)."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ranks = 4 if name == "P=4" else 1
    layer = MoELayer(CONFIG, world=ranks)
    x_SH, routing = cases.make_tokens(TOKENS, CONFIG), cases.make_routing("zipf", TOKENS, CONFIG)
    return (lambda: per_expert_loop(x_SH, routing, layer)) if name == "loop" else (lambda: layer(x_SH, routing=routing))


def peak_memory(name: str) -> tuple[int, int]:
    """(peak during the forward, of that beyond what was there before), bytes, in a fresh process."""
    folder = __file__.rsplit("/", 1)[0]
    code = f"import sys; sys.path.insert(0, {folder!r}); import test_reference_speed as b; b.run_alone({name!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, peak = json.loads(done.stdout.splitlines()[-1])
    return peak, peak - before


def _memory(field: str) -> int:
    """A field of this process' status (VmRSS, VmHWM) in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(field))) * 1024


def run_alone(name: str) -> None:
    """Print memory before a forward and its peak; the kernel's high-water mark is reset in between."""
    with torch.no_grad():
        forward = job(name)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        for _ in range(3):
            forward()
    print(json.dumps([before, _memory("VmHWM")]))


@pytest.mark.benchmark
def test_speed_and_memory(capsys) -> None:
    jobs = {name: job(name) for name in ("loop", *LIMITS)}
    times: dict[str, list[float]] = {name: [] for name in jobs}
    with torch.no_grad():
        expected = jobs["loop"]()
        for name in LIMITS:
            torch.testing.assert_close(jobs[name](), expected, rtol=1e-4, atol=1e-5)
        for _ in range(25):
            for name, forward in jobs.items():
                start = time.perf_counter()
                forward()
                times[name].append(time.perf_counter() - start)
    best = {name: min(values) for name, values in times.items()}
    memory = {name: peak_memory(name) for name in jobs}
    with capsys.disabled():
        print(f"\nloop: {best['loop'] * 1e3:.0f} ms, peak {memory['loop'][0] / 1e6:.0f} MB")
        for name, limit in LIMITS.items():
            print(
                f"{name}: time {best[name] / best['loop']:.2f} of the loop's (at most {limit}), "
                f"peak memory {memory[name][0] / memory['loop'][0]:.2f} (at most {MEMORY_LIMIT}; "
                f"the forward adds {memory[name][1] / 1e6:.0f} MB, the loop {memory['loop'][1] / 1e6:.0f} MB)"
            )
    for name, limit in LIMITS.items():
        assert best[name] <= limit * best["loop"]
        assert memory[name][0] <= MEMORY_LIMIT * memory["loop"][0]
