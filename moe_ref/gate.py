"""The gate: which experts a token goes to, and with what weight.

    logits = x W^T (+ b)                 fp32 whatever the layer's dtype (fp64 for float64 layers)
    scores = softmax(logits) or sigmoid(logits)
    chosen = top-k of scores (+ selection bias), inside the best groups if the choice is group-limited
    weight = scores[chosen], renormalised and scaled on request

Real kernels fuse this with the counting of rows; here every step is a line. Ties go to the lower expert id, which
`torch.topk` doesn't promise, so the choice is a stable sort.

Letters: S tokens of a rank, H hidden, E experts, K choices per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ref.config import MoEConfig
from moe_ref.experts import accumulate_dtype, elementwise, tiled_linear

MASKED = -1
"""Expert id of a route that contributes nothing."""

_TINY = 1e-20
"""Guards the renormalisation of a token whose K scores are all zero (they then stay zero)."""


@dataclass(frozen=True)
class Routing:
    """Which experts each token of one rank goes to.

    Attributes:
        expert_SK: int64, ids in [-1, E); -1 is masked. The same id may stand twice in a row: both count.
        weight_SK: fp32 (fp64 for float64 layers), differentiable if it comes from the gate.
        logits_SE, scores_SE: what the gate computed, or None where routing was handed in; needed by auxiliary losses.
    """

    expert_SK: Tensor
    weight_SK: Tensor
    logits_SE: Tensor | None = None
    scores_SE: Tensor | None = None

    def to(self, device: torch.device | str) -> Routing:
        """The same routing on another device."""
        moved = [None if t is None else t.to(device) for t in (self.logits_SE, self.scores_SE)]
        return Routing(self.expert_SK.to(device), self.weight_SK.to(device), *moved)

    def checked(self, config: MoEConfig, tokens: int, device: torch.device) -> Routing:
        """This routing with int64 ids and fp32 (fp64) weights; looks at no value, so the device is not waited for.

        Raises:
            TypeError, ValueError: wrong type, shape, dtype or device for `tokens` tokens of the layer.
        """
        want = (tokens, config.top_k)
        for name, value in (("expert_SK", self.expert_SK), ("weight_SK", self.weight_SK)):
            if not isinstance(value, Tensor):
                raise TypeError(f"routing.{name} is {type(value).__name__}, expected a tensor of shape {list(want)}")
            if value.shape != want:
                raise ValueError(
                    f"routing.{name} has shape {list(value.shape)}, expected [tokens, top_k] = {list(want)}"
                )
            if value.device != device:
                raise ValueError(
                    f"routing.{name} is on {value.device}, but the tokens are on {device}; move one of them"
                )
        integers, floats = self.expert_SK.dtype, self.weight_SK.dtype
        if integers not in (torch.int64, torch.int32, torch.int16, torch.int8):
            raise TypeError(f"routing.expert_SK is {integers}, expected signed integers (torch.int64)")
        if not floats.is_floating_point:
            raise TypeError(f"routing.weight_SK is {floats}, expected floating point (torch.float32)")
        wanted = accumulate_dtype(config.torch_dtype)
        if integers == torch.int64 and floats == wanted:
            return self
        return Routing(self.expert_SK.long(), self.weight_SK.to(wanted), self.logits_SE, self.scores_SE)

    def check_values(self, config: MoEConfig) -> None:
        """Raise ValueError for an id outside [-1, E) or a weight that is not finite; names the first."""
        expert_SK, weight_SK = self.expert_SK, self.weight_SK.detach()
        bad = (expert_SK < MASKED) | (expert_SK >= config.experts)
        if bool(bad.any()):
            s, k = (int(i) for i in bad.nonzero()[0])
            raise ValueError(
                f"routing.expert_SK[{s}, {k}] is {int(expert_SK[s, k])}, expected an id in [0, {config.experts}) "
                "or -1 for a masked route"
            )
        bad = (expert_SK != MASKED) & ~weight_SK.isfinite()
        if bool(bad.any()):
            s, k = (int(i) for i in bad.nonzero()[0])
            raise ValueError(f"routing.weight_SK[{s}, {k}] is {float(weight_SK[s, k])}, expected a finite weight")

    def split(self, sizes: list[int]) -> list[Routing]:
        """One routing for each run of `sizes` tokens."""
        if sizes == [self.expert_SK.shape[0]]:
            return [self]
        fields = (self.expert_SK, self.weight_SK, self.logits_SE, self.scores_SE)
        parts = [[None] * len(sizes) if value is None else value.split(sizes) for value in fields]
        return [Routing(*values) for values in zip(*parts, strict=True)]


def stable_top_k(scores_SE: Tensor, k: int) -> Tensor:
    """Ids of the k largest scores per row, largest first, ties to the lower id; int64 [S, k]."""
    return torch.sort(scores_SE, dim=-1, descending=True, stable=True).indices[:, :k]


def group_mask(choice_SE: Tensor, config: MoEConfig) -> Tensor:
    """True where an expert belongs to one of the token's best groups; bool [S, E]."""
    tokens, size = choice_SE.shape[0], config.experts // config.num_groups
    grouped_SGM = choice_SE.view(tokens, config.num_groups, size)
    if config.group_score == "max":
        group_SG = grouped_SGM.amax(dim=-1)
    else:
        group_SG = grouped_SGM.topk(2, dim=-1).values.sum(dim=-1)
    chosen_SG = stable_top_k(group_SG, config.top_groups)
    keep_SG = torch.zeros_like(group_SG, dtype=torch.bool).scatter_(1, chosen_SG, True)
    return keep_SG.repeat_interleave(size, dim=1)


def gate(
    x_SH: Tensor,
    weight_EH: Tensor,
    config: MoEConfig,
    bias_E: Tensor | None = None,
    selection_bias_E: Tensor | None = None,
) -> Routing:
    """Route every token.

    Args:
        x_SH: tokens, any floating dtype.
        weight_EH: router weight; bias_E its bias if config.router_bias; selection_bias_E [E] if config.selection_bias.

    Returns:
        Routing with expert_SK in order of falling score, weight_SK in fp32 (fp64 for float64 tokens).

    Raises:
        ValueError: a logit or a selection bias is NaN or infinite; names the token and the expert.
    """
    dtype = accumulate_dtype(x_SH.dtype)
    bias = None if bias_E is None else bias_E.to(dtype)
    logits_SE = tiled_linear(x_SH.to(dtype), weight_EH.to(dtype), bias, config.tile_rows)
    finite_SE = logits_SE.detach().isfinite()
    if not bool(finite_SE.all()):
        s, e = (int(i) for i in (~finite_SE).nonzero()[0])
        raise ValueError(
            f"the gate's logit of token {s} for expert {e} is {float(logits_SE.detach()[s, e])}, expected a finite "
            "number; look for NaN or infinity in the hidden states or the router weight"
        )
    scores_SE = logits_SE.softmax(dim=-1) if config.scoring == "softmax" else elementwise(torch.sigmoid, logits_SE)

    choice_SE = logits_SE if config.top_k_order == "before_scores" else scores_SE
    choice_SE = choice_SE.detach()
    if selection_bias_E is not None:
        if not bool(selection_bias_E.isfinite().all()):
            e = int((~selection_bias_E.isfinite()).nonzero()[0, 0])
            raise ValueError(f"selection_bias[{e}] is {float(selection_bias_E[e])}, expected a finite number")
        choice_SE = choice_SE + selection_bias_E.to(dtype)
    if config.num_groups > 1:
        choice_SE = choice_SE.masked_fill(~group_mask(choice_SE, config), float("-inf"))
    expert_SK = stable_top_k(choice_SE, config.top_k)

    if config.top_k_order == "before_scores":
        chosen_SK = logits_SE.gather(1, expert_SK)
        weight_SK = chosen_SK.softmax(dim=-1) if config.scoring == "softmax" else elementwise(torch.sigmoid, chosen_SK)
    else:
        weight_SK = scores_SE.gather(1, expert_SK)
    if config.renormalize:
        weight_SK = weight_SK / weight_SK.sum(dim=-1, keepdim=True).clamp_min(_TINY)
    return Routing(expert_SK, weight_SK * config.routed_scaling, logits_SE, scores_SE)


def keep_within_capacity(routing: Routing, config: MoEConfig) -> tuple[Routing, int]:
    """Mask the routes beyond the capacity of one rank; returns the routing and how many routes were dropped.

    Priority is token order, then choice order: for each expert the first C of this rank's routes stay
    (C = config.capacity(S)). Weights of the remaining routes are left as they are.
    """
    tokens = routing.expert_SK.shape[0]
    capacity = config.capacity(tokens)
    if capacity is None:
        return routing, 0
    flat_N = routing.expert_SK.flatten()
    one_hot_NE = F.one_hot(flat_N.clamp_min(0), config.experts) * (flat_N != MASKED).unsqueeze(1)
    position_N = one_hot_NE.cumsum(dim=0).gather(1, flat_N.clamp_min(0).unsqueeze(1)).squeeze(1) - 1
    dropped_N = (flat_N != MASKED) & (position_N >= capacity)
    kept_SK = flat_N.masked_fill(dropped_N, MASKED).view_as(routing.expert_SK)
    return Routing(kept_SK, routing.weight_SK, routing.logits_SE, routing.scores_SE), int(dropped_N.sum())


def balance_loss(routing: Routing, expert_load_E: Tensor) -> Tensor:
    """Load-balancing loss E * sum_e f_e P_e (Shazeer et al. 2017 in the form of Switch Transformer, section 2.2).

    f_e: share of routed rows that went to expert e, over all ranks (no gradient); P_e: mean normalised score of e over
    this rank's tokens. Linear in P, so the token-weighted mean over ranks is the loss of the whole batch. 1.0 is
    balanced.
    """
    if routing.scores_SE is None:
        raise ValueError("routing was handed in without scores; the balance loss needs the gate's scores_SE")
    scores_SE = routing.scores_SE / routing.scores_SE.sum(dim=-1, keepdim=True).clamp_min(_TINY)
    share_E = expert_load_E.to(scores_SE) / expert_load_E.sum().clamp_min(1)
    mean_E = scores_SE.sum(dim=0) / max(scores_SE.shape[0], 1)
    return scores_SE.shape[1] * (share_E * mean_E).sum()


def z_loss(routing: Routing) -> Tensor:
    """Router z-loss, mean over tokens of logsumexp(logits)^2 (ST-MoE, section 3.3)."""
    if routing.logits_SE is None:
        raise ValueError("routing was handed in without logits; the z-loss needs the gate's logits_SE")
    return routing.logits_SE.logsumexp(dim=-1).square().sum() / max(routing.logits_SE.shape[0], 1)
