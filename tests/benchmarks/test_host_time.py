"""Host time of a call of a fused layer, beside the least that any layer's call costs; no GPU, no kernel.

    pytest tests/benchmarks/test_host_time.py -n 0 -s
    PYTHONPATH=tests:. python tests/benchmarks/test_host_time.py            microseconds and ratios alone
    PYTHONPATH=tests:. python tests/benchmarks/test_host_time.py training   where the time of one case goes

The least: a module that allocates its result and calls a C function that does nothing. Its calls and the layer's
alternate in one process, a few at a time; the figure is the median of the paired ratios, which a busy machine moves
less than times. What is in neither: the driver's launch, about the same for both.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fused_host import FirstOf, fused_on_cpu, nothing
from torch import Tensor, nn

from moe_ref import MoEConfig, MoELayer, Routing
from moe_ref.placement import Placement

pytestmark = pytest.mark.benchmark

CONFIG = MoEConfig(hidden=2048, intermediate=64, experts=128, top_k=8, dtype="bfloat16", max_tokens=512)
EVERYTHING = CONFIG.replace(
    scoring="sigmoid", selection_bias=True, router_bias=True, expert_bias=True, shared_intermediate=64, shared_gate=True
)
TOKENS, ROWS, CALLS = 8, 300, 10
LIMITS = {
    "inference": 6.5,
    "block": 6.5,
    "routing": 20.0,
    "replicas": 15.0,
    "fp32 router": 16.0,
    "every feature": 9.0,
    "training": 33.0,
}
"""Case -> the layer's time in times the least, at most."""


class Least(nn.Module):
    """A module call, an allocation, a call into C."""

    def __init__(self) -> None:
        super().__init__()
        self.function = nothing()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        self.function(None)
        return y


@contextmanager
def cases() -> Iterator[dict[str, Callable[[], Any]]]:
    """The calls, one function each."""
    with fused_on_cpu():
        plain, every = MoELayer(CONFIG, backend="fused"), MoELayer(EVERYTHING, backend="fused")
        wide = MoELayer(CONFIG, backend="fused")
        wide.router.weight = nn.Parameter(wide.router.weight.detach().float())
        placement = Placement.from_replicas([[e % 2, (e + 1) % 2] for e in range(CONFIG.experts)], 2)
        placed = MoELayer(CONFIG, backend="fused", world=FirstOf(2), placement=placement)
        x = torch.zeros(TOKENS, CONFIG.hidden, dtype=torch.bfloat16)
        chosen = torch.arange(CONFIG.top_k).repeat(TOKENS, 1)
        routing = Routing(chosen, torch.full(chosen.shape, 1 / CONFIG.top_k))
        batch, tracked = x[None], x.clone().requires_grad_()
        least = Least()
        yield {
            "least": lambda: least(x),
            "inference": lambda: plain(x),
            "block": lambda: plain(batch),
            "routing": lambda: plain(x, routing=routing),
            "replicas": lambda: placed(x),
            "fp32 router": lambda: wide(x),
            "every feature": lambda: every(x),
            "training": lambda: plain(tracked),
        }


def measure() -> dict[str, tuple[float, float]]:
    """Case -> (microseconds per call, times the least), medians."""

    def seconds(call: Callable[[], Any], name: str) -> float:
        with torch.set_grad_enabled(name == "training"):
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            return (time.perf_counter() - start) / CALLS

    out = {}
    with cases() as calls:
        for name, call in calls.items():
            if name != "least":
                pairs = [(seconds(call, name), seconds(calls["least"], name)) for _ in range(ROWS)][10:]
                times, ratios = [t for t, _ in pairs], [t / least for t, least in pairs]
                out[name] = (1e6 * statistics.median(times), statistics.median(ratios))
    return out


def table(measured: dict[str, tuple[float, float]]) -> str:
    lines = [f"{'case':14} {'us':>7} {'times the least':>16} {'limit':>6}"]
    lines += [f"{name:14} {us:7.1f} {ratio:16.1f} {LIMITS[name]:6.1f}" for name, (us, ratio) in measured.items()]
    return "\n".join(lines)


def test_host_time(capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra [fused]) is not installed")
    measured = measure()
    with capsys.disabled():
        print("\n" + table(measured))
    for name, (_, ratio) in measured.items():
        assert ratio <= LIMITS[name], name


def profile(name: str) -> None:
    """Time by function of one case."""
    with cases() as calls, torch.set_grad_enabled(name == "training"):
        calls[name]()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(10_000):
            calls[name]()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table(measure())) if len(sys.argv) == 1 else profile(sys.argv[1])
