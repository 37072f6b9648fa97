"""The definition: a dense einsum over all experts. Everything else in this project is tested against it.

    y_s = sum_e c[s, e] * FFN_e(x_s) + shared(x_s),    c[s, e] = sum of the weights of s's routes to e

It computes every expert on every token, so it is E / K times too slow and nobody's backend; it is short enough to be
checked by eye. It is meant for float64, where the order of a sum doesn't show.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ref.config import MoEConfig
from moe_ref.experts import activate
from moe_ref.gate import Routing


def definition(
    x_SH: Tensor,
    routing: Routing,
    config: MoEConfig,
    up_EUH: Tensor,
    down_EHD: Tensor,
    up_bias_EU: Tensor | None = None,
    down_bias_EH: Tensor | None = None,
    shared_SH: Tensor | None = None,
) -> Tensor:
    """y_SH of an MoE layer, densely.

    Args:
        x_SH: tokens; up_EUH [E, 2D or D, H] and down_EHD [E, H, D] with optional biases: all experts' weights.
        routing: ids and weights; masked routes (-1) contribute nothing.
        shared_SH: output of the shared expert, weight 1, or None.
    """
    used_SK = routing.expert_SK >= 0
    weight_SK = torch.where(used_SK, routing.weight_SK.to(x_SH.dtype), 0)
    combine_SE = x_SH.new_zeros(x_SH.shape[0], config.experts)
    combine_SE = combine_SE.scatter_add(1, routing.expert_SK.clamp_min(0), weight_SK)

    up_SEU = torch.einsum("sh,euh->seu", x_SH, up_EUH)
    if up_bias_EU is not None:
        up_SEU = up_SEU + up_bias_EU
    hidden_SED = activate(up_SEU.flatten(0, 1), config).unflatten(0, up_SEU.shape[:2])
    out_SEH = torch.einsum("sed,ehd->seh", hidden_SED, down_EHD)
    if down_bias_EH is not None:
        out_SEH = out_SEH + down_bias_EH
    y_SH = torch.einsum("se,seh->sh", combine_SE, out_SEH)
    return y_SH if shared_SH is None else y_SH + shared_SH


def relative_error(value: Tensor, exact: Tensor) -> float:
    """||value - exact||_F / ||exact||_F in float64; 0.0 where both are zero or empty."""
    value, exact = value.detach().double(), exact.detach().double()
    difference, scale = float((value - exact).norm()), float(exact.norm())
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))
