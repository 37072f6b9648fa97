"""`moe-ref run --hf PATH`: the MoE layers of a local checkpoint on P ranks, measured against the definition.

Every MoE layer is loaded by itself, run, reported and dropped, so memory is needed for one layer only. Attention is not
run. What a layer is given is what it would see at the top of the residual stream's first token mixing: the checkpoint's
own embeddings of the text's bytes (a byte taken as a token id), normalised, times the gain of the layer's own norm.
Loads from such input show that the layer works and how it balances; they are not those of the model on the text.

Letters: S tokens of a rank, H hidden, E experts, P ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from moe_ref.compat.checkpoint import Checkpoint, load_layer
from moe_ref.definition import definition
from moe_ref.errors import UsageError
from moe_ref.gate import Routing
from moe_ref.layer import LayerStats, MoELayer
from moe_ref.main_job import TOLERANCE
from moe_ref.text import load_text
from moe_ref.world import DistributedWorld, World


@dataclass(frozen=True)
class HfJob:
    """What to run: S tokens per rank, buffers, the layer's dtype (None: the stored one), backend, text."""

    tokens: int
    layout: str = "compact"
    backend: str = "ref"
    dtype: str | None = None
    text: str = "prose"


def run_checkpoint(
    checkpoint: Checkpoint, job: HfJob, world: World, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Run all MoE layers; every rank calls this and gets the same values, `layers` with one entry per layer.

    Raises:
        UsageError: the checkpoint lacks something, or the backend can't run here.
    """
    if job.tokens < 0:
        raise UsageError(f"--tokens is {job.tokens}, expected at least 0")
    x_SH = _embedded(checkpoint, job, world)
    layers = []
    for index in checkpoint.layers:
        layer = load_layer(
            checkpoint,
            index,
            dtype=job.dtype,
            layout=job.layout,
            max_tokens=job.tokens,
            backend=job.backend,
            world=world,
            device=device,
        ).requires_grad_(False)
        gain = checkpoint.norm_weight(index)
        if gain is not None and gain.shape != (layer.config.hidden,):
            raise UsageError(
                f"the norm before layer {index} has shape {list(gain.shape)}, expected [{layer.config.hidden}]; "
                "config and weights are of different models"
            )
        given = [(x if gain is None else x * gain.float()).to(device, layer.config.torch_dtype) for x in x_SH]
        with torch.no_grad():
            y_SH, stats = layer(given, return_stats=True)
            layers.append({"layer": index, **_entry(checkpoint, index, layer, given, y_SH, stats, world)})
    return {
        "hf": str(checkpoint.path),
        "model_type": checkpoint.family.model_type,
        "ranks": world.num_ranks,
        "tokens": job.tokens,
        "text": job.text,
        "input": "embeddings of bytes, normalised",
        "layers": layers,
        "relative_error": max(entry["relative_error"] for entry in layers),
        "correct": all(entry["relative_error"] <= TOLERANCE[entry["dtype"]] for entry in layers),
    }


def _embedded(checkpoint: Checkpoint, job: HfJob, world: World) -> list[Tensor]:
    """Per local rank the normalised embeddings of its tokens, fp32 [S, H]."""
    table_VH = checkpoint.tensor("embed_tokens.weight")
    if table_VH is None:
        raise UsageError(f"{checkpoint.path} has no tensor embed_tokens.weight to make input from")
    hidden = checkpoint.config(next(iter(checkpoint.layers)), job.dtype).hidden
    if table_VH.dim() != 2 or table_VH.shape[1] != hidden or not table_VH.shape[0] or not table_VH.is_floating_point():
        raise UsageError(
            f"embed_tokens.weight of {checkpoint.path} has shape {list(table_VH.shape)} ({table_VH.dtype}), expected "
            f"numbers [vocabulary, {hidden}]; config and weights are of different models"
        )
    data = load_text(job.text, world.num_ranks * job.tokens).data
    ids_N = torch.tensor(list(data), dtype=torch.int64) % table_VH.shape[0]
    rows_NH = torch.nn.functional.rms_norm(table_VH[ids_N].float(), (table_VH.shape[1],))
    return [rows_NH[rank * job.tokens : (rank + 1) * job.tokens] for rank in world.local_ranks]


def _entry(
    checkpoint: Checkpoint,
    index: int,
    layer: MoELayer,
    x_SH: list[Tensor],
    y_SH: list[Tensor],
    stats: LayerStats,
    world: World,
) -> dict[str, Any]:
    """What one layer did, over all ranks."""
    whole = load_layer(checkpoint, index, dtype=layer.config.dtype).requires_grad_(False)
    assert stats.record.routing is not None
    difference = norm = 0.0
    for x, y, routing in zip(x_SH, y_SH, stats.record.routing, strict=True):
        for first in range(0, x.shape[0], 128):  # the definition computes every expert on every token
            part = slice(first, first + 128)
            exact_SH = _exact(whole, x[part].cpu(), routing.to("cpu"), part)
            difference += float((y[part].cpu().double() - exact_SH).square().sum())
            norm += float(exact_SH.square().sum())
    if isinstance(world, DistributedWorld):
        sums = torch.tensor([difference, norm], dtype=torch.float64, device=layer.router.weight.device)
        torch.distributed.all_reduce(sums, group=world.group)
        difference, norm = sums.tolist()
    config = layer.config
    return {
        "experts": config.experts,
        "top_k": config.top_k,
        "hidden": config.hidden,
        "intermediate": config.intermediate,
        "dtype": config.dtype,
        "expert_load": stats.expert_load,
        "rows_per_rank": stats.rank_load,
        "max_over_mean": stats.max_over_mean,
        "bytes_local": stats.bytes_local,
        "bytes_remote": stats.bytes_remote,
        "relative_error": math.sqrt(difference / norm) if norm else math.sqrt(difference),
        "seconds": sum(stats.record.seconds.values()),
    }


def _exact(whole: MoELayer, x_SH: Tensor, routing: Routing, part: slice) -> Tensor:
    """The float64 definition on the weights as stored in the layer's dtype, with the layer's routing."""

    def exact(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.double()

    shared = whole.shared_expert
    shared_SH = None
    if shared is not None:
        wide = MoELayer(
            whole.config.replace(dtype="float64", experts=1, top_k=1, num_groups=1, top_groups=1)
        ).shared_expert
        assert wide is not None
        wide.load_state_dict({name: value.double() for name, value in shared.state_dict().items()})
        shared_SH = wide.requires_grad_(False)(x_SH.double())
    chosen = Routing(routing.expert_SK[part], routing.weight_SK[part].double())
    return definition(
        x_SH.double(),
        chosen,
        whole.config,
        whole.up_parameter.double(),
        whole.down_proj.double(),
        exact(whole.up_bias_parameter),
        exact(whole.down_proj_bias),
        shared_SH,
    )


def print_checkpoint_report(values: dict[str, Any], out: Console) -> None:
    """The values as a table, one line per layer."""
    title = f"{values['model_type']} on {values['ranks']} ranks, {values['tokens']} tokens each; {values['input']}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for column in ("layer", "experts", "top-k", "hidden", "width", "dtype", "max / mean", "idle experts", "rel. error"):
        table.add_column(column, justify="right")
    for entry in values["layers"]:
        table.add_row(
            str(entry["layer"]),
            str(entry["experts"]),
            str(entry["top_k"]),
            str(entry["hidden"]),
            str(entry["intermediate"]),
            entry["dtype"],
            f"{entry['max_over_mean']:.3f}",
            str(int((entry["expert_load"] == 0).sum())),
            f"{entry['relative_error']:.2e}",
        )
    out.print(table)
