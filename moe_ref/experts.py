"""The expert FFN on a block of rows that belong to one expert.

    plain    hidden = act(x W1^T + b1)                        out = hidden W2^T + b2
    gated    hidden = act(x Wg^T + bg) * (x Wu^T + bu)        out = hidden Wd^T + bd
    clamped  g = min(gate, L), u = clamp(up, -L, L)           hidden = (u + 1) * g * sigmoid(a g)

Two rules make the numbers comparable between backends:

* Products accumulate in fp32 (fp64 for float64); the activation is applied before anything is rounded; then `hidden`
  and `out` are each rounded once to the layer's dtype. Eager 16-bit PyTorch would round three times more.
* The row-tile rule: rows are zero-padded to a multiple of `tile_rows` before a product. BLAS libraries take other paths
  for a handful of rows, which would make the bits of a row depend on how many rows came with it.

A tensor-core kernel does the same by nature: its tile is always full, its accumulators are fp32.

Letters: N rows, H hidden, D intermediate, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ref.config import MoEConfig
from moe_ref.layout import align_up


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of one expert, as views into the layer's parameters.

    Attributes:
        up_UH: [2D, H] (gate_up_proj) if gated, else [D, H] (up_proj); up_bias_U its bias or None.
        down_HD: [H, D] (down_proj); down_bias_H its bias or None.
    """

    up_UH: Tensor
    down_HD: Tensor
    up_bias_U: Tensor | None = None
    down_bias_H: Tensor | None = None


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for float64 layers, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tiled_linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tile_rows: int) -> Tensor:
    """x W^T + b with the row-tile rule; [N, I] -> [N, O] in the dtype of its operands.

    Fewer outputs than a tile has rows (few experts, a [1, H] gate) are padded too: a BLAS takes such a product for a
    matrix-vector one, whose bits depend on N.
    """
    rows, outputs = x_NI.shape[0], weight_OI.shape[0]
    more_rows, more_outputs = align_up(rows, tile_rows) - rows, max(tile_rows - outputs, 0)
    if more_rows:
        x_NI = F.pad(x_NI, (0, 0, 0, more_rows))
    if more_outputs:
        weight_OI = F.pad(weight_OI, (0, 0, 0, more_outputs))
        bias_O = None if bias_O is None else F.pad(bias_O, (0, more_outputs))
    y_NO = F.linear(x_NI, weight_OI, bias_O)
    return y_NO[:rows, :outputs] if more_rows or more_outputs else y_NO


def elementwise(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """function(value) for a transcendental function of single elements, with bits that don't depend on the shape.

    Vector loops finish the last few elements of a tensor with another, scalar formula, and take it throughout where
    elements are not adjacent; so they are made adjacent and padded. Rows of whole vectors are right as they are, even
    apart from each other (a half of [N, 2D]), except for gelu, which PyTorch leaves to oneDNN where rows are adjacent.
    """
    if value.shape[-1] % 64 == 0 and value.stride(-1) == 1 and function is not F.gelu:
        return function(value)
    flat, count = value.reshape(-1).contiguous(), value.numel()
    padding = align_up(count, 64) - count
    return (
        function(F.pad(flat, (0, padding)))[:count].view(value.shape) if padding else function(flat).view(value.shape)
    )


def activate(up_NU: Tensor, config: MoEConfig) -> Tensor:
    """Activation on accumulators: [N, 2D] or [N, D] -> [N, D], no rounding."""
    act = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
    if not config.gated:
        return elementwise(act[config.activation], up_NU)
    if config.interleaved:
        gate_ND, up_ND = up_NU[:, 0::2], up_NU[:, 1::2]
    else:
        gate_ND, up_ND = up_NU.chunk(2, dim=-1)
    if config.activation == "clamped_swiglu":
        gate_ND = gate_ND.clamp(max=config.clamp_limit)
        up_ND = up_ND.clamp(-config.clamp_limit, config.clamp_limit)
        return (up_ND + 1) * (gate_ND * elementwise(torch.sigmoid, config.clamp_alpha * gate_ND))
    return elementwise(act[config.activation], gate_ND) * up_ND


def _up_cast(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if value is None else value.to(dtype)


def gemm0(x_NH: Tensor, weights: ExpertWeights, config: MoEConfig) -> Tensor:
    """First product and activation: rows [N, H] -> hidden [N, D], rounded once to the rows' dtype."""
    dtype = accumulate_dtype(x_NH.dtype)
    up_NU = tiled_linear(x_NH.to(dtype), weights.up_UH.to(dtype), _up_cast(weights.up_bias_U, dtype), config.tile_rows)
    return activate(up_NU, config).to(x_NH.dtype)


def gemm1(hidden_ND: Tensor, weights: ExpertWeights, config: MoEConfig) -> Tensor:
    """Second product: hidden [N, D] -> expert output [N, H], rounded once to the rows' dtype."""
    dtype = accumulate_dtype(hidden_ND.dtype)
    out_NH = tiled_linear(
        hidden_ND.to(dtype), weights.down_HD.to(dtype), _up_cast(weights.down_bias_H, dtype), config.tile_rows
    )
    return out_NH.to(hidden_ND.dtype)
