"""Parameters of a layer that every rank holds in full: the router's and the shared expert's.

Letters: S tokens of a rank, H hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_ref.config import MoEConfig
from moe_ref.experts import ExpertWeights, accumulate_dtype, elementwise, gemm0, gemm1, tiled_linear


class Router(nn.Module):
    """Parameters of the gate: weight [E, H], optional bias [E], optional buffer selection_bias [E] (fp32)."""

    bias: nn.Parameter | None
    selection_bias: Tensor | None

    def __init__(self, config: MoEConfig, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden, dtype=config.torch_dtype, device=device))
        bias = torch.empty(config.experts, dtype=config.torch_dtype, device=device) if config.router_bias else None
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        selection = torch.zeros(config.experts, device=device) if config.selection_bias else None
        self.register_buffer("selection_bias", selection)

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        # .to(bfloat16) and its like move the selection bias but keep it fp32: rounding it would change who is chosen
        bias = self.selection_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.selection_bias = bias.to(self.weight.device)
        return self


class SharedExpert(nn.Module):
    """An always-on expert of its own width, weight 1; with a gate: sigmoid(x w) times its output (Qwen2-MoE)."""

    gate: nn.Parameter | None

    def __init__(self, config: MoEConfig, device: torch.device | str | None) -> None:
        super().__init__()
        self.config = config.replace(interleaved=False)
        width = config.shared_intermediate
        rows = 2 * width if config.gated else width

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=config.torch_dtype, device=device))

        self.up_proj = parameter(rows, config.hidden)
        self.down_proj = parameter(config.hidden, width)
        self.register_parameter("gate", parameter(1, config.hidden) if config.shared_gate else None)

    def forward(self, x_SH: Tensor) -> Tensor:
        """[S, H] -> [S, H] in the rows' dtype."""
        weights = ExpertWeights(self.up_proj.to(x_SH.dtype), self.down_proj.to(x_SH.dtype))
        out_SH = gemm1(gemm0(x_SH, weights, self.config), weights, self.config)
        if self.gate is None:
            return out_SH
        dtype = accumulate_dtype(x_SH.dtype)
        scale_S1 = tiled_linear(x_SH.to(dtype), self.gate.to(dtype), None, self.config.tile_rows)
        return (elementwise(torch.sigmoid, scale_S1) * out_SH.to(dtype)).to(x_SH.dtype)


def hash_seed(seed: int, stream: int) -> int:
    """Seed of stream `stream`: distinct streams of distinct seeds don't overlap in practice; seed >= 0 of any size."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0] >> 1)
