"""The main job: real text through the MoE layer of a trained model, on P ranks, measured against the definition.

    text -> hidden states of the shipped model -> P ranks x S tokens -> layer -> report

In a simulated world all ranks live here; under torchrun every process computes the hidden states of the whole text in
the same way and takes its own slice, so both worlds are given the same bits. What is reported is the same on both, too:
loads are sums over all ranks, times those of the slowest, the digest runs over all outputs in rank order.

Letters: S tokens of a rank, H hidden, E experts, K choices, P ranks.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ref import backends
from moe_ref.config import MoEConfig
from moe_ref.definition import definition
from moe_ref.errors import UsageError
from moe_ref.gate import Routing
from moe_ref.layer import LayerStats, MoELayer
from moe_ref.limits import check_memory, check_seed
from moe_ref.text import load_text
from moe_ref.train.checkpoint import tiny_moe
from moe_ref.train.model import hidden_states, moe_layer
from moe_ref.wire import count_tokens
from moe_ref.world import DistributedWorld, World

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
"""Largest relative error against the definition at which the job counts as correct, per dtype."""

CHECK_TOKENS = 256
"""Tokens that the definition takes at once: it computes every expert on every token, and memory is finite."""


@dataclass(frozen=True)
class Job:
    """What to run; None means as in the trained checkpoint.

    Attributes:
        tokens: S, per rank. layout, wire_format, capacity_factor, dtype, top_k, experts: as in MoEConfig.
        text: "prose", "code", "excerpt", or a file.
        seed: of the weights of a fresh layer (another number of experts than the checkpoint's).
    """

    tokens: int = 2048
    experts: int | None = None
    top_k: int | None = None
    layout: str = "compact"
    backend: str = "ref"
    capacity_factor: float | None = None
    dtype: str = "float32"
    text: str = "prose"
    seed: int = 0
    wire_format: str = "routes"

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise UsageError(f"tokens is {self.tokens}, expected at least 0")
        check_seed(self.seed)


@dataclass(frozen=True)
class Report:
    """What a job did, over all ranks.

    Attributes:
        values: what `--json` prints.
        config: of the layer.
        rows_PG: routes that rank p had for rank g, int64 [P, P].
        expert_rank: rank that holds each expert (its first replica), int64 [E].
        notes: lines that a reader of the numbers must know.
        tolerance: what relative_error is held against.
    """

    values: dict[str, Any]
    config: MoEConfig
    rows_PG: np.ndarray
    expert_rank: np.ndarray
    notes: tuple[str, ...]
    tolerance: float

    @property
    def correct(self) -> bool:
        """Whether the result is within the tolerance of the definition."""
        return self.values["relative_error"] <= self.tolerance


def trained_layer() -> tuple[MoEConfig, dict[str, Tensor]]:
    """Config and logical state dict (all E experts, fp32) of the trained MoE layer of the shipped model."""
    _, layer = moe_layer(tiny_moe()[0])
    return layer.config, layer.state_dict()


def check_job_memory(job: Job, ranks: int) -> None:
    """Raise UsageError if one process of the job needs more memory than the machine has.

    Counted is what is there at the same time whatever the layout: hidden states and results of the whole text, rows on
    their way there and back, and the weights; in fp32.
    """
    config, _ = trained_layer()
    top_k = config.top_k if job.top_k is None else job.top_k
    total = ranks * job.tokens
    check_memory(
        total * (2 + 2 * top_k) * config.hidden * 4,
        f"{ranks} ranks x {job.tokens} tokens",
        "lower --tokens or --ranks",
    )
    experts = config.experts if job.experts is None else job.experts
    check_memory(experts * config.parameters_per_expert * 4, f"{experts} experts", "lower --experts")


def logical_weights(job: Job) -> tuple[MoEConfig, dict[str, Tensor], str | None]:
    """Config, weights of all experts, and a note if they are not the trained ones.

    Raises:
        ValueError: the job's values don't make a legal config.
    """
    config, state = trained_layer()
    changes: dict[str, Any] = {
        "layout": job.layout,
        "wire_format": job.wire_format,
        "capacity_factor": job.capacity_factor,
        "dtype": job.dtype,
        "max_tokens": job.tokens,
    }
    if job.top_k is not None:
        changes["top_k"] = job.top_k
    if job.experts in (None, config.experts):
        return config.replace(**changes), state, None
    config = config.replace(experts=job.experts, **changes)
    fresh = MoELayer(config.replace(dtype="float32"), seed=job.seed)
    note = (
        f"the gate is untrained: the checkpoint has {state['router.weight'].shape[0]} experts, so this layer of "
        f"{config.experts} is a fresh one (seed {job.seed})"
    )
    return config, fresh.state_dict(), note


def run_job(job: Job, world: World, device: torch.device | str = "cpu") -> Report:
    """Run the job on `device`; every rank of the world calls this, every rank gets the report.

    Raises:
        UsageError, ValueError: the text can't be had, the values make no legal config, or the backend can't run here.
    """
    check_job_memory(job, world.num_ranks)
    config, state, untrained = logical_weights(job)
    layer = MoELayer(config, backend=job.backend, world=world, device=device)
    layer.load_logical_state_dict({name: value.to(device) for name, value in state.items()})
    layer.requires_grad_(False)

    text = load_text(job.text, world.num_ranks * job.tokens)
    all_x_SH = hidden_states(tiny_moe()[0], text.data, len(text.data)).to(device, config.torch_dtype)
    x_SH = [all_x_SH[rank * job.tokens : (rank + 1) * job.tokens] for rank in world.local_ranks]

    with torch.no_grad():
        layer(x_SH)  # The first call pays for threads, kernels and connections.
        start = time.perf_counter()
        y_SH, stats = layer(x_SH, return_stats=True)
        seconds = time.perf_counter() - start
        errors = _deviation(config, state, x_SH, y_SH, stats)
    remote = _remote_tokens(world, stats)
    everyone = _gather(world, (seconds, stats.record.seconds, errors, [_bytes(y) for y in y_SH], remote))
    return _report(job, layer, stats, everyone, (untrained, text.note))


# --- parts of run_job ---------------------------------------------------------------------------------------------


def _bytes(y_SH: Tensor) -> bytes:
    """Values as fp32, little-endian."""
    return y_SH.float().cpu().numpy().astype("<f4").tobytes()


@dataclass(frozen=True)
class Deviation:
    """Differences from the float64 definition, one entry per piece of tokens: largest, and squared norms."""

    largest: list[float]
    difference: list[float]
    norm: list[float]


def _deviation(
    config: MoEConfig, state: dict[str, Tensor], x_SH: list[Tensor], y_SH: list[Tensor], stats: LayerStats
) -> Deviation:
    """How far this process' results are from the definition.

    The definition gets the weights and inputs as the layer holds them (rounded to its dtype) and the layer's routing.
    """
    device = x_SH[0].device
    # In two steps: rounded to the layer's dtype first, exact after.
    up, down = (state[name].to(device, config.torch_dtype).double() for name in ("gate_up_proj", "down_proj"))
    assert stats.record.routing is not None
    found = Deviation([], [], [])
    for x, y, routing in zip(x_SH, y_SH, stats.record.routing, strict=True):
        for first in range(0, x.shape[0], CHECK_TOKENS):
            part = slice(first, first + CHECK_TOKENS)
            chosen = Routing(routing.expert_SK[part], routing.weight_SK[part])
            exact_SH = definition(x[part].double(), chosen, config, up, down)
            error_SH = y[part].double() - exact_SH
            found.largest.append(float(error_SH.abs().max()))
            found.difference.append(float(error_SH.square().sum()))
            found.norm.append(float(exact_SH.square().sum()))
    return found


def _remote_tokens(world: World, stats: LayerStats) -> int:
    """Tokens that this process' ranks have for other ranks, each once a rank."""
    record, total = stats.record, 0
    assert record.routing is not None
    assert record.plan is not None
    for rank, routing in zip(world.local_ranks, record.routing, strict=True):
        tokens_G = count_tokens(routing.expert_SK, record.plan, rank)
        total += int(tokens_G.sum() - tokens_G[rank])
    return total


def _gather(world: World, value: Any) -> list[Any]:
    """Every process' value, in rank order; a simulated world is one process."""
    if not isinstance(world, DistributedWorld):
        return [value]
    values: list[Any] = [None] * world.num_ranks
    dist.all_gather_object(values, value, group=world.group)
    return values


def _report(job: Job, layer: MoELayer, stats: LayerStats, everyone: list[Any], notes: tuple[str | None, ...]) -> Report:
    times, stages, errors, outputs, remote_tokens = zip(*everyone, strict=True)
    # fsum is exact, so that the result does not depend on which process held which tokens.
    difference = math.fsum(value for e in errors for value in e.difference)
    norm = math.fsum(value for e in errors for value in e.norm)
    digest = hashlib.sha256()
    for data in outputs:
        for part in data:
            digest.update(part)
    record, config, ranks = stats.record, layer.config, layer.world.num_ranks
    assert record.plan is not None
    rows_PG = record.plan.quota_by_slot().sum(axis=2)
    values = {
        "backend": layer.backend,
        "world": "distributed" if isinstance(layer.world, DistributedWorld) else "simulated",
        "device": layer.router.weight.device.type,
        "text": job.text,
        "trained_gate": notes[0] is None,
        "ranks": ranks,
        "tokens": job.tokens,
        "hidden": config.hidden,
        "intermediate": config.intermediate,
        "experts": config.experts,
        "top_k": config.top_k,
        "layout": config.layout,
        "wire_format": config.wire_format,
        "dtype": config.dtype,
        "capacity_factor": config.capacity_factor,
        "tokens_per_rank": stats.tokens_per_rank,
        "rows_per_rank": stats.rank_load,
        "expert_load": stats.expert_load,
        "expert_load_before_capacity": stats.expert_load_before_capacity,
        "max_over_mean": stats.max_over_mean,
        "bytes_local": stats.bytes_local,
        "bytes_remote": stats.bytes_remote,
        "rows_remote": {"routes": int(rows_PG.sum() - rows_PG.trace()), "tokens": sum(remote_tokens)},
        "dropped": stats.dropped,
        "max_abs_error": max((value for e in errors for value in e.largest), default=0.0),
        "relative_error": math.sqrt(difference / norm) if norm else math.sqrt(difference),
        "output_sha256": digest.hexdigest(),
        "seconds": max(times),
        "seconds_per_stage": {stage: max(s[stage] for s in stages) for stage in stages[0]},
    }
    return Report(
        values=values,
        config=config,
        rows_PG=rows_PG,
        expert_rank=layer.placement.rank_ED[:, 0],
        notes=tuple(note for note in notes if note),
        tolerance=max(TOLERANCE[config.dtype], backends.tolerance(backends.get(layer.backend), config.dtype)),
    )
