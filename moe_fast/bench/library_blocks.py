"""MoE blocks of transformers against the same layers with backend="fused": one GPU, the library's grouped_mm experts.

    python -m moe_fast.bench blocks --out docs/results/megakernel_blocks.json

Times are what a user sees, the host's launches included: CUDA events around one forward alone on an idle device, and
around a row of forwards, as a model of many blocks calls them: there a block's launches can hide behind the kernels of
the block before it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from moe_fast.bench.measure import interleaved
from moe_ref.errors import CheckFailed
from moe_ref.layer import MoELayer

BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (
        "Mixtral",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}  # fmt: skip
"""Family -> (prefix of its classes, settings): the layers of Qwen3-30B-A3B and Mixtral-8x7B."""
TOKENS: dict[str, tuple[int, ...]] = {
    "qwen3_moe": (32, 128, 1024, 4096, 8192, 16384),
    "mixtral": (32, 128, 1024, 4096, 8192),
}
CALLS = 16
"""Forwards in a row."""
DIFFERENT = 3e-2
"""Largest relative difference (Frobenius) of tokens with the same experts: the library rounds weights and sums to
bf16."""
ALIKE = 0.8
"""Smallest share of tokens that go to the same experts: the library rounds logits to bf16, the kernel doesn't."""


def make_block(family: str, experts_implementation: str = "grouped_mm") -> nn.Module:
    """A block with random bf16 weights on the current CUDA device."""
    prefix, settings = BLOCKS[family]
    module = f"transformers.models.{family}"
    configuration = importlib.import_module(f"{module}.configuration_{family}")
    modeling = importlib.import_module(f"{module}.modeling_{family}")
    config = getattr(configuration, f"{prefix}Config")(**settings)
    config._experts_implementation = experts_implementation
    with torch.device("cuda", torch.cuda.current_device()):
        block = getattr(modeling, f"{prefix}SparseMoeBlock")(config).to(torch.bfloat16).eval()
    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return block


def chosen_ids(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Experts that a block's router chooses for x [1, S, H], ascending, int64 [S, K]."""
    router: Any = getattr(block, "gate", None) or block.router
    return router(x.reshape(-1, x.shape[-1]))[2].sort(-1).values


def _layer_ids(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """The same of a layer."""
    _, stats = layer(x[0], return_stats=True)
    return stats.record.routing[0].expert_SK.sort(-1).values


def compare(family: str, repetitions: int) -> list[dict[str, Any]]:
    """Rows of the result, one per S; raises CheckFailed if the two don't compute the same."""
    from moe_fast.engine_choice import close_engines
    from moe_ref.compat import from_transformers

    block = make_block(family)
    layer = from_transformers(block, backend="fused", max_tokens=max(TOKENS[family]))
    generator = torch.Generator(device="cuda").manual_seed(1)
    hidden = layer.config.hidden
    rows = []
    for tokens in TOKENS[family]:
        x = torch.randn(1, tokens, hidden, device="cuda", generator=generator).to(torch.bfloat16)

        def library(x: torch.Tensor = x) -> torch.Tensor:
            out = block(x)
            return out[0] if isinstance(out, tuple) else out

        def fused(x: torch.Tensor = x) -> torch.Tensor:
            return layer(x[0])

        with torch.no_grad():
            ours, theirs = fused().double(), library().double().reshape(tokens, hidden)
            # where two logits are closer than 16 bits tell apart, the library's rounded ones may choose another expert
            alike = (chosen_ids(block, x) == _layer_ids(layer, x)).all(1)
            if alike.float().mean() < ALIKE:
                raise CheckFailed(f"{family}: {int((~alike).sum())} of {tokens} tokens go to other experts")
            difference = float((ours - theirs)[alike].norm() / theirs[alike].norm())
            if not difference < DIFFERENT:
                raise CheckFailed(f"{family}: the layer differs from the block by {difference:.2e} at S={tokens}")
            functions = {"library": library, "fused": fused}
            alone = interleaved(functions, repetitions, hide_host=False)
            row = interleaved(functions, max(repetitions // 2, 3), hide_host=False, calls=CALLS)
        rows.append(
            {
                "family": family,
                "tokens": tokens,
                "ms": alone,
                "library_over_fused": _ratio(alone),
                "ms_in_a_row": row,
                "library_over_fused_in_a_row": _ratio(row),
                "relative_difference": float(f"{difference:.3g}"),
                "same_experts": round(float(alike.float().mean()), 4),
            }
        )
    close_engines()
    return rows


def _ratio(times: dict[str, dict[str, float]]) -> float:
    return round(times["library"]["median"] / times["fused"]["median"], 3)


def render(results: dict[str, Any]) -> str:
    """The table of a result."""
    lines = [
        "milliseconds per forward, median, one GPU, host included; library: transformers, grouped_mm experts",
        f"{'':19} {'one forward alone':>24}   {f'{CALLS} in a row, each':>24}",
        f"{'block':12} {'S':>6} {'library':>8} {'fused':>8} {'ratio':>6}   {'library':>8} {'fused':>8} {'ratio':>6}",
    ]
    for r in results["rows"]:
        cells = [
            f"{r[ms]['library']['median']:8.3f} {r[ms]['fused']['median']:8.3f} {r[ratio]:6.2f}"
            for ms, ratio in (("ms", "library_over_fused"), ("ms_in_a_row", "library_over_fused_in_a_row"))
        ]
        lines.append(f"{r['family']:12} {r['tokens']:>6} {'   '.join(cells)}")
    return "\n".join(lines)
