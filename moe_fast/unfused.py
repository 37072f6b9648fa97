"""The chain that a user would pick instead of the megakernel: torch gate, sort, all-to-all, grouped_mm, combine.

Two forms of the same arithmetic. `forward` is eager: it asks the host for the splits of the all-to-all, as such code
does; its operations are frozen, so that ratios in results stay comparable from one version to the next. `Captured` is
the tuned form: splits frozen for its routing, everything in one CUDA graph.

It is the baseline of every figure, the second opinion for every value, and what the fused backend's backward
recomputes. One difference in arithmetic: the library rounds the first product before the activation; the kernel and
the reference round after it.

Letters: S tokens of a rank, H hidden, D intermediate, E experts, K choices, P ranks, X local slots, N routed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_fast.layers import check_layer, group_of, is_placed, no_device
from moe_fast.routes import Routes, make_routes
from moe_fast.weights import ChainWeights, layer_weights
from moe_ref.balance.plan import Plan
from moe_ref.config import MoEConfig
from moe_ref.gate import Routing, group_mask
from moe_ref.pipeline import Record

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def _library(rows_NH: Tensor, weight_XHD: Tensor, ends_X: Tensor) -> Tensor:
    library: Any = torch  # older versions have the function under a private name only
    function = getattr(F, "grouped_mm", None) or library._grouped_mm
    return function(rows_NH, weight_XHD, offs=ends_X)


@cache
def library_takes(dtype: torch.dtype, device: str) -> bool:
    """Whether this torch's grouped_mm takes a dtype on a kind of device; asked once, with a small product."""
    rows = torch.zeros(32, 32, dtype=dtype, device=device)
    weight = torch.zeros(2, 32, 32, dtype=dtype, device=device).transpose(1, 2)
    try:
        _library(rows, weight, torch.tensor([16, 32], dtype=torch.int32, device=device))
    except RuntimeError:
        return False
    return True


@cache
def capturable(dtype: torch.dtype) -> bool:
    """Whether a CUDA graph can hold the chain: whether this torch's grouped_mm takes the dtype without asking the host
    where the experts' rows end, as it does where it has no kernel of its own for it."""
    if not library_takes(dtype, "cuda"):
        return False
    rows = torch.zeros(32, 32, dtype=dtype, device="cuda")
    weight = torch.zeros(2, 32, 32, dtype=dtype, device="cuda").transpose(1, 2)
    ends = torch.tensor([16, 32], dtype=torch.int32, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _library(rows, weight, ends)
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


def grouped_mm(rows_NH: Tensor, weight_XHD: Tensor, ends_X: Tensor) -> Tensor:
    """One product per expert over consecutive rows; ends_X: where each expert's rows end, int32.

    Where the library's grouped_mm doesn't take the dtype, one product after the other (which asks the host).
    """
    if library_takes(rows_NH.dtype, rows_NH.device.type):
        return _library(rows_NH, weight_XHD, ends_X)
    ends = [0, *ends_X.tolist()]
    return torch.cat([rows_NH[ends[i] : ends[i + 1]] @ weight_XHD[i] for i in range(len(ends) - 1)])


def unsupported(config: MoEConfig) -> list[str]:
    """Features of the reference that this chain leaves out, by name."""
    out = []
    if config.dtype == "float64":
        out.append("dtype=float64")
    if config.capacity_factor is not None:
        out.append(f"capacity_factor={config.capacity_factor}")
    if config.wire_format != "routes":
        out.append(f"wire_format={config.wire_format}")
    return out


def gate_scores(x_SH: Tensor, weights: ChainWeights, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """(logits, scores) [S, E] in fp32; the router's product sums in fp32."""
    router = weights.router_EH
    if torch.is_grad_enabled() or not x_SH.is_cuda or router.dtype != x_SH.dtype:
        logits_SE = F.linear(x_SH.float(), router.float())
    else:
        logits_SE = torch.mm(x_SH, router.t(), out_dtype=torch.float32)
    if weights.router_bias_E is not None:
        logits_SE = logits_SE + weights.router_bias_E.float()
    return logits_SE, logits_SE.softmax(-1) if config.scoring == "softmax" else logits_SE.sigmoid()


def gate(x_SH: Tensor, weights: ChainWeights, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """(expert_SK int64, weight_SK fp32)."""
    logits_SE, scores_SE = gate_scores(x_SH, weights, config)
    choice_SE = (logits_SE if config.top_k_order == "before_scores" else scores_SE).detach()
    if weights.selection_bias_E is not None:
        choice_SE = choice_SE + weights.selection_bias_E
    if config.num_groups > 1:
        choice_SE = choice_SE.masked_fill(~group_mask(choice_SE, config), float("-inf"))
    expert_SK = choice_SE.topk(config.top_k, dim=-1).indices
    return expert_SK, weigh(logits_SE, scores_SE, expert_SK, config)


def weigh(logits_SE: Tensor, scores_SE: Tensor, expert_SK: Tensor, config: MoEConfig) -> Tensor:
    """Weights of chosen experts."""
    if config.top_k_order == "before_scores":
        chosen_SK = logits_SE.gather(1, expert_SK)
        weight_SK = chosen_SK.softmax(-1) if config.scoring == "softmax" else chosen_SK.sigmoid()
    else:
        weight_SK = scores_SE.gather(1, expert_SK)
    if config.renormalize:
        weight_SK = weight_SK / weight_SK.sum(-1, keepdim=True).clamp_min(1e-20)
    return weight_SK * config.routed_scaling


def activate(product_NU: Tensor, config: MoEConfig) -> Tensor:
    """The activation on the first product: [N, 2D] or [N, D] -> [N, D], in the product's dtype."""
    if not config.gated:
        return ACTIVATIONS[config.activation](product_NU)
    if config.interleaved:
        gate_ND, up_ND = product_NU[:, 0::2], product_NU[:, 1::2]
    else:
        gate_ND, up_ND = product_NU.chunk(2, dim=1)
    if config.activation == "clamped_swiglu":
        gate_ND = gate_ND.clamp(max=config.clamp_limit)
        up_ND = up_ND.clamp(-config.clamp_limit, config.clamp_limit)
        return (up_ND + 1) * (gate_ND * torch.sigmoid(config.clamp_alpha * gate_ND))
    return ACTIVATIONS[config.activation](gate_ND) * up_ND


def feed_forward(rows_NH: Tensor, ends_X: Tensor, weights: ChainWeights, config: MoEConfig) -> Tensor:
    """All local experts over expert-major rows."""
    product = grouped_mm(rows_NH, weights.up_XUH.transpose(1, 2), ends_X)
    if weights.up_bias_XU is None or weights.down_bias_XH is None:
        return grouped_mm(activate(product, config), weights.down_XHD.transpose(1, 2), ends_X)
    # rows in order of their expert: the expert of row n is the number of experts that end at or before n
    row_N = torch.arange(rows_NH.shape[0], device=rows_NH.device, dtype=ends_X.dtype)
    expert_N = torch.searchsorted(ends_X, row_N, right=True)
    # in fp32, above all for the backward, which sums a bias' gradient over the rows
    hidden_ND = activate(product.float() + weights.up_bias_XU.float()[expert_N], config).to(rows_NH.dtype)
    out_NH = grouped_mm(hidden_ND, weights.down_XHD.transpose(1, 2), ends_X)
    return (out_NH.float() + weights.down_bias_XH.float()[expert_N]).to(rows_NH.dtype)


def shared_expert(x_SH: Tensor, weights: ChainWeights, config: MoEConfig) -> Tensor | None:
    """Output of the shared expert on this rank's tokens, or None."""
    if weights.shared_up_VH is None or weights.shared_down_HW is None:
        return None
    product = F.linear(x_SH, weights.shared_up_VH)
    out_SH = F.linear(activate(product, config.replace(interleaved=False)), weights.shared_down_HW)
    if weights.shared_gate_1H is None:
        return out_SH
    return torch.sigmoid(F.linear(x_SH.float(), weights.shared_gate_1H.float())) * out_SH


class _Exchange(torch.autograd.Function):
    """all_to_all_single whose backward is the opposite one."""

    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out_NH = rows_NH.new_empty(sum(receive), rows_NH.shape[1])
        dist.all_to_all_single(out_NH, rows_NH.contiguous(), receive, send, group=group)
        return out_NH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0]
        out = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return out, None, None, None


def compute(
    x_SH: Tensor,
    weight_SK: Tensor,
    routes: Routes,
    weights: ChainWeights,
    config: MoEConfig,
    group: Any = None,
    ranks: int = 1,
    keep: dict[str, Tensor] | None = None,
) -> Tensor:
    """Dispatch, experts, return and combine for known routes; differentiable in x, weight_SK and the weights."""
    tokens, k = weight_SK.shape
    rows_NH = x_SH[routes.order_N // k]
    if ranks > 1:
        rows_NH = _Exchange.apply(rows_NH, routes.send, routes.receive, group)[routes.arrange_N]
    out_NH = feed_forward(rows_NH, routes.ends_X, weights, config)
    if keep is not None:
        keep["rows"], keep["output"] = rows_NH, out_NH
    if ranks > 1:
        assert routes.arrange_N is not None
        back_NH = torch.empty_like(out_NH).index_copy(0, routes.arrange_N, out_NH)
        out_NH = _Exchange.apply(back_NH, routes.receive, routes.send, group)
    returned_NH = x_SH.new_zeros(tokens * k, x_SH.shape[1]).index_copy(0, routes.order_N, out_NH)
    if keep is not None:
        keep["returned"] = returned_NH
    y_SH = (returned_NH.view(tokens, k, x_SH.shape[1]) * weight_SK.unsqueeze(-1)).sum(1)
    shared_SH = shared_expert(x_SH, weights, config)
    return (y_SH if shared_SH is None else y_SH + shared_SH).to(x_SH.dtype)


def forward(x_SH: Tensor, weights: ChainWeights, config: MoEConfig, group: Any = None, ranks: int = 1) -> Tensor:
    """The eager chain, gate included."""
    expert_SK, weight_SK = gate(x_SH, weights, config)
    return compute(x_SH, weight_SK, make_routes(expert_SK, config, group, ranks), weights, config, group, ranks)


class Captured:
    """The tuned chain in one CUDA graph, gate and sort included; splits stay those of the routing it was captured with.

    Replaying it with a batch whose routing has other splits would be wrong: it is a baseline for timing, refreshed by
    capturing again.
    """

    def __init__(
        self, x_SH: Tensor, weights: ChainWeights, config: MoEConfig, group: Any = None, ranks: int = 1
    ) -> None:
        with torch.no_grad():
            # kept: the graph reads its tensors at every replay
            frozen = self.frozen = make_routes(gate(x_SH, weights, config)[0], config, group, ranks)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step(x_SH, weights, config, frozen, group, ranks)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.y_SH = self._step(x_SH, weights, config, frozen, group, ranks)

    @staticmethod
    def _step(x_SH: Tensor, weights: ChainWeights, config: MoEConfig, frozen: Routes, group: Any, ranks: int) -> Tensor:
        expert_SK, weight_SK = gate(x_SH, weights, config)
        order_N = torch.sort(expert_SK.flatten().to(torch.int16), stable=True).indices
        routes = Routes(order_N, frozen.send, frozen.receive, frozen.arrange_N, frozen.ends_X, frozen.counts_PE)
        return compute(x_SH, weight_SK, routes, weights, config, group, ranks)

    def __call__(self) -> Tensor:
        """Replay; the result is in `y_SH`."""
        self.graph.replay()
        return self.y_SH


class UnfusedBackend:
    """Backend "unfused": the eager chain on a layer."""

    name = "unfused"
    default_dtype = "bfloat16"

    def unavailable(self) -> str | None:
        return no_device()

    def forward(
        self, layer: MoELayer, x_SH: Sequence[Tensor], routing: Sequence[Routing] | None, *, keep: bool = False
    ) -> Record:
        """See `moe_ref.backends.Backend`; hidden activations are not kept."""
        check_layer(self.name, unsupported(layer.config))
        _, ranks, group = group_of(layer)
        config, x = layer.config, x_SH[0]
        weights = layer_weights(layer)
        if routing is None:
            expert_SK, weight_SK = gate(x, weights, config)
        else:
            expert_SK, weight_SK = routing[0].expert_SK, routing[0].weight_SK
        routes = make_routes(expert_SK, config, group, ranks, layer.make_plan if is_placed(layer) else None)
        kept: dict[str, Tensor] | None = {} if keep else None
        y_SH = compute(x, weight_SK, routes, weights, config, group, ranks, kept)
        record = Record(
            routing=[Routing(expert_SK, weight_SK)],
            before_PE=routes.counts_PE,
            counts_PE=routes.counts_PE,
            tokens_P=layer.world.gather(np.array([[x.shape[0]]]))[:, 0],
            plan=routes.plan or Plan.plain(routes.counts_PE, layer.placement),
            y_SH=[y_SH],
        )
        if kept is not None:
            record.rows_NH, record.output_NH = [kept["rows"]], [kept["output"]]
            record.returned_NH = [kept["returned"]]
        return record
