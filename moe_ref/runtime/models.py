"""Run execution models on the same tasks and say what each gives, in the terms of FlashMoE's evaluation.

    latency_us           first launch to last end of one layer
    utilisation          SM time in tiles, passes and the gate, over all SMs and the latency
    overlap_efficiency   O_e = T(2) / T(P) at the same tokens per rank (weak scaling); 1 is perfect, None for one rank
    gpu_ops              operations that one rank's host issues per layer
    bytes_sent           payload over links, both ways, all ranks: remote routed rows x H x element size, twice
    tokens_per_s         all ranks' tokens over the latency

Letters: P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_ref.errors import UsageError
from moe_ref.runtime.callplan import CallPlan
from moe_ref.runtime.chains import bulk, chunked
from moe_ref.runtime.machine import Machine, Noise
from moe_ref.runtime.run import Interval, Run
from moe_ref.runtime.simulator import Simulator
from moe_ref.runtime.workload import Workload

MODELS = ("bulk", "chunked", "megakernel")

NO_DEADLINE = 1e15
"""us; a comparison may take as long as it takes."""


@dataclass
class Result:
    """One model on one workload; see the module's docstring. `intervals` is empty unless recording was asked for."""

    model: str
    latency_us: float
    utilisation: float
    gpu_ops: int
    bytes_sent: int
    tokens_per_s: float
    overlap_efficiency: float | None = None
    intervals: list[Interval] = field(default_factory=list)
    run: Run | None = None

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        names = ("latency_us", "utilisation", "overlap_efficiency", "gpu_ops", "bytes_sent", "tokens_per_s")
        return {name: getattr(self, name) for name in names}


def run_model(
    model: str,
    work: Workload,
    machine: Machine,
    noise: Noise | None = None,
    record: bool = False,
    captured: bool = False,
    call: CallPlan | None = None,
) -> Result:
    """Simulate one layer.

    Args:
        model: one of MODELS. call: geometry of `work`, if it is at hand.
        captured: the chains run as a CUDA graph.

    Raises:
        UsageError: no such model, no tokens, or more ranks than the machine has GPUs.
    """
    if model not in MODELS:
        raise UsageError(f"model is {model!r}, expected one of {', '.join(MODELS)}")
    if work.tokens == 0:
        raise UsageError("tokens is 0: there is nothing to time; give each rank at least one token")
    if work.ranks > machine.gpus:
        raise UsageError(f"{work.ranks} ranks were asked for, but machine {machine.name} has {machine.gpus} GPUs")
    noise, call = noise or Noise(), call or work.call()
    if model == "megakernel":
        run = Simulator([call], machine, work.experts, noise, record=record, deadline_us=NO_DEADLINE).run()
        latency, busy, ops, sent, intervals = run.latency_us(), run.busy_us, 1, sum(run.payload_bytes), run.intervals
    else:
        run = None
        chain = (bulk if model == "bulk" else chunked)(call, machine, work, noise, record, captured=captured)
        latency, busy, ops, sent = max(chain.ends_us), chain.busy_us, chain.gpu_ops, chain.payload_bytes
        intervals = chain.intervals
    utilisation = sum(busy) / (machine.sms * work.ranks * latency)
    tokens = sum(call.tokens_P) / (latency * 1e-6)
    return Result(model, latency, utilisation, ops, sent, tokens, None, intervals, run)


def compare(
    work: Workload,
    machine: Machine,
    models: Sequence[str] = MODELS,
    noise: Noise | None = None,
    record: bool = False,
    captured: bool = False,
) -> dict[str, Result]:
    """Every model on the same routing, with its overlap efficiency."""
    call = work.call()
    results = {m: run_model(m, work, machine, noise, record, captured, call) for m in models}
    if work.ranks >= 2:
        pair = work.replace(ranks=2)
        pair_call = call if work.ranks == 2 else pair.call()
        for model, result in results.items():
            two = result if work.ranks == 2 else run_model(model, pair, machine, noise, False, captured, pair_call)
            result.overlap_efficiency = two.latency_us / result.latency_us
    return results
