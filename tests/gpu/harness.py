"""What the GPU tests share: inputs, routings, the expected content of every buffer, and the comparison.

Expected buffers are computed on the GPU, expert by expert, in fp32 from the same rounded inputs, straight from the
definition: rows expert-major, then source rank, then token; hidden and output rounded once; fp32 sum in k order.
Nothing here uses the kernel's own offsets.

Letters: S tokens of a rank, H hidden, E experts, K choices, P ranks, X local slots.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_fast import unfused
from moe_fast.engine import Engine
from moe_fast.heap import local_heap, symmetric_heap
from moe_fast.kernel.shapes import KernelShape, heap_regions
from moe_ref.config import MoEConfig

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Relative error (Frobenius) of a buffer against fp32 arithmetic on the same rounded inputs."""
ROUTINGS = ("gate", "uniform", "zipf", "one_expert", "one_rank", "masked", "duplicates")


@dataclass
class Case:
    """One cell of the matrix; `tokens` may hold one S per rank."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: str
    gated: bool
    dtype: str
    tokens: tuple[int, ...]
    routing: str = "gate"
    scheduler: str = "tickets"
    scoring: str = "softmax"
    renormalize: bool = True
    routed_scaling: float = 1.0
    selection_bias: bool = False
    max_tokens: int = 4096

    @property
    def config(self) -> MoEConfig:
        return MoEConfig(
            hidden=self.hidden,
            intermediate=self.intermediate,
            experts=self.experts,
            top_k=self.top_k,
            activation=self.activation,
            gated=self.gated,
            dtype=self.dtype,
            scoring=self.scoring,
            renormalize=self.renormalize,
            routed_scaling=self.routed_scaling,
            selection_bias=self.selection_bias,
            max_tokens=self.max_tokens,
            tile_rows=128,
        )

    def __str__(self) -> str:
        act = self.activation + ("*u" if self.gated else "")
        return (
            f"H{self.hidden} D{self.intermediate} E{self.experts} K{self.top_k} {act} {self.dtype} "
            f"S{list(self.tokens)} {self.routing} {self.scheduler}"
        )


def rank_and_size() -> tuple[int, int]:
    """Place in the process group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


_engines: dict = {}


def engine_for(case: Case, deadline_s: float = 5.0) -> Engine:
    """Engine of a case, kept: engines of one shape share buffers."""
    _, ranks = rank_and_size()
    shape = KernelShape.from_config(case.config, ranks, case.scheduler)
    key = (shape, case.max_tokens)
    if key not in _engines:
        if len(_engines) >= 6:
            for old in _engines.values():
                old.heap.close()
            _engines.clear()
        size = heap_regions(shape, case.max_tokens)[1]
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        heap = symmetric_heap(size, device) if ranks > 1 else local_heap(size, device)
        _engines[key] = Engine(shape, heap, case.max_tokens, deadline_s)
        heap.barrier()
    return _engines[key]


@dataclass
class Inputs:
    """Everything of all ranks, on this rank's device, so that it can compute what it should see."""

    x: list[torch.Tensor]
    router: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    bias: torch.Tensor | None
    expert: list[torch.Tensor] | None
    weight: list[torch.Tensor] | None


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Same on every rank: one generator of the device, one seed."""
    device = torch.device("cuda", torch.cuda.current_device())
    g = torch.Generator(device=device).manual_seed(seed)
    c, dtype = case.config, case.config.torch_dtype

    def normal(*shape, scale):
        return (torch.randn(*shape, device=device, generator=g) * scale).to(dtype)

    _, ranks = rank_and_size()
    tokens = [case.tokens[p % len(case.tokens)] for p in range(ranks)]
    x = [normal(s, c.hidden, scale=1.0) for s in tokens]
    router = normal(c.experts, c.hidden, scale=c.hidden**-0.5)
    first = normal(c.experts, c.up_rows, c.hidden, scale=c.hidden**-0.5)
    second = normal(c.experts, c.hidden, c.intermediate, scale=c.intermediate**-0.5)
    bias = torch.randn(c.experts, device=device, generator=g) * 0.1 if case.selection_bias else None
    expert = weight = None
    if case.routing != "gate":
        expert = [make_ids(case, s, g, device) for s in tokens]
        weight = [torch.rand(s, c.top_k, device=device, generator=g) for s in tokens]
    return Inputs(x, router, first, second, bias, expert, weight)


def make_ids(case: Case, tokens: int, g: torch.Generator, device: torch.device) -> torch.Tensor:
    """Expert ids [S, K], int64, of the case's kind."""
    c = case.config
    _, ranks = rank_and_size()
    noise = torch.rand(tokens, c.experts, device=device, generator=g)
    if case.routing == "zipf":
        share = torch.arange(1, c.experts + 1, device=device).float() ** -1.2
        noise = noise ** (1 / share)
    elif case.routing == "one_rank":
        count = -(-c.experts // ranks)
        noise[:, max(count, c.top_k) :] = -1
    ids = noise.topk(c.top_k, dim=1).indices if tokens else noise.new_zeros(0, c.top_k, dtype=torch.int64)
    if case.routing == "one_expert":
        # all tokens have the same choices; the first is everybody's
        ids = torch.arange(c.top_k, device=device).expand(tokens, c.top_k).clone() + (c.experts - c.top_k)
    elif case.routing == "masked":
        ids = ids.masked_fill(torch.rand(tokens, c.top_k, device=device, generator=g) < 0.5, -1)
    elif case.routing == "duplicates" and c.top_k > 1:
        ids[::3, 1] = ids[::3, 0]
    return ids


def activation(name: str, x: torch.Tensor) -> torch.Tensor:
    return {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}[name](x)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||a - e|| / ||e||; inf where a isn't finite."""
    difference = (actual.double() - expected.double()).norm()
    scale = expected.double().norm()
    value = float(difference / scale) if float(scale) else float(difference)
    return value if value == value else float("inf")


def reference_routing(case: Case, inputs: Inputs, p: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate in fp64 on the rounded inputs: (ids, weights, the scores chosen by)."""
    c = case.config
    logits = inputs.x[p].double() @ inputs.router.double().t()
    scores = logits.softmax(-1) if c.scoring == "softmax" else logits.sigmoid()
    choice = scores if inputs.bias is None else scores + inputs.bias.double()
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : c.top_k]
    return ids, scores, choice


def gate_weights(case: Case, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights of chosen ids."""
    weight = scores.gather(1, ids)
    if case.config.renormalize:
        weight = weight / weight.sum(-1, keepdim=True).clamp_min(1e-20)
    return weight * case.config.routed_scaling


def run_case(case: Case, seed: int = 0, engine: Engine | None = None, poison: bool = True) -> dict[str, float]:
    """One call, every named buffer compared; returns the relative error of each, raises AssertionError."""
    engine = engine or engine_for(case)
    inputs = make_inputs(case, seed)
    rank, ranks = rank_and_size()
    shape, c, dtype = engine.shape, case.config, case.config.torch_dtype
    low, high = shape.first_expert(rank), shape.first_expert(rank + 1)
    if poison:
        engine.poison()
    x = inputs.x[rank]
    y = torch.full_like(x, float("nan"))
    given = {} if inputs.expert is None else {"expert_SK": inputs.expert[rank], "weight_SK": inputs.weight[rank]}
    engine.launch(
        x, inputs.router, inputs.first[low:high], inputs.second[low:high], selection_bias_E=inputs.bias, out=y, **given
    )
    engine.check()
    got = engine.buffers(x.shape[0])
    errors: dict[str, float] = {}
    limit = TOLERANCE[dtype]

    # routing: ids agree up to ties that fp32 can't tell apart; weights belong to the chosen ids
    if inputs.expert is None:
        ids, scores, choice = reference_routing(case, inputs, rank)
        mine = got.expert_SK.long()
        if mine.numel():
            assert mine.min() >= 0, "the gate masked a route"
            assert (mine.sort(1).values.diff(dim=1) > 0).all() if c.top_k > 1 else True, "an expert twice in a token"
            gap = (choice.gather(1, ids) - choice.gather(1, mine)).abs().max().item()
            assert gap < 1e-5, f"gate chose an expert whose score is {gap} off"
            errors["weight"] = relative(got.weight_SK, gate_weights(case, scores, mine))
            assert errors["weight"] < 1e-5, errors
        all_ids = gather_ids(got.expert_SK, inputs, ranks)
    else:
        assert torch.equal(got.expert_SK.long(), inputs.expert[rank])
        all_ids = inputs.expert
    weight = got.weight_SK

    # counts of every rank
    want_counts = torch.stack([torch.bincount(i[i >= 0].flatten(), minlength=c.experts) for i in all_ids])
    assert torch.equal(got.counts_PE.long(), want_counts), "counts"

    # rows, hidden: expert-major, then source, then token; tiles of 128 per expert
    first_row, tiles = 0, 0
    row_difference, hidden_got, hidden_want = 0, [], []
    for e in range(low, high):
        parts = []
        for p in range(ranks):
            token, _ = (all_ids[p] == e).nonzero(as_tuple=True)
            parts.append(inputs.x[p][token])
        rows = torch.cat(parts)
        count = rows.shape[0]
        row_difference += int((got.rows_RH[first_row : first_row + count] != rows).sum())
        hidden_got.append(got.hidden_RD[first_row : first_row + count])
        hidden_want.append(ffn_hidden(c, rows, inputs.first[e]))
        first_row += -(-count // 128) * 128
        tiles += -(-count // 128)
    assert tiles == got.row_tiles, f"{got.row_tiles} row tiles, expected {tiles}"
    assert row_difference == 0, f"{row_difference} elements of the dispatched rows differ"
    errors["hidden"] = relative(torch.cat(hidden_got), torch.cat(hidden_want))
    assert errors["hidden"] <= limit, errors

    # returned rows and the result, at home
    flat = all_ids[rank].reshape(-1)
    returned = torch.zeros(flat.numel(), c.hidden, device=x.device)
    exact = torch.zeros(flat.numel(), c.hidden, device=x.device, dtype=torch.float64)
    for e in range(c.experts):
        at = (flat == e).nonzero(as_tuple=True)[0]
        if at.numel():
            rows = x[at // c.top_k]
            hidden = ffn_hidden(c, rows, inputs.first[e])
            returned[at] = hidden.float() @ inputs.second[e].float().t()
            exact[at] = ffn_exact(c, rows, inputs.first[e], inputs.second[e])
    valid = flat >= 0
    errors["returned"] = relative(got.returned_NH[valid], returned[valid])
    assert errors["returned"] <= limit, errors
    w = torch.where(all_ids[rank] >= 0, weight, torch.zeros_like(weight)).double().unsqueeze(-1)
    want = (w * exact.view(-1, c.top_k, c.hidden)).sum(1)
    errors["y"] = relative(y, want)
    assert errors["y"] <= limit, errors
    # no worse than what the unfused chain makes of the same routing
    other = unfused_result(case, inputs, all_ids, weight, want_counts)
    if other is not None:
        errors["unfused"] = relative(other, want)
        assert errors["y"] <= 1.5 * errors["unfused"] + 1e-6, errors
    # the combine itself, from the returned rows that are there: fp32, k order, one rounding
    total = torch.zeros(x.shape, device=x.device)
    for k in range(c.top_k):
        row = got.returned_NH.view(-1, c.top_k, c.hidden)[:, k].float() if x.shape[0] else total
        use = (all_ids[rank][:, k] >= 0).unsqueeze(-1)
        total = torch.where(use, torch.addcmul(total, row, weight[:, k : k + 1]), total)
    errors["combine"] = relative(y, total.to(dtype))
    assert errors["combine"] <= limit / 8, errors
    return errors


def unfused_result(
    case: Case, inputs: Inputs, all_ids: list[torch.Tensor], weight: torch.Tensor, counts_PE: torch.Tensor
) -> torch.Tensor | None:
    """The unfused chain's result for the kernel's routing; None where a rank has no token or row."""
    rank, ranks = rank_and_size()
    c = case.config
    bounds = [unfused.local_experts(c, p, ranks) for p in range(ranks)]
    if any(int(counts_PE[:, a:b].sum()) == 0 for a, b in bounds) or any(x.shape[0] == 0 for x in inputs.x):
        return None
    low, high = bounds[rank]
    weights = unfused.ChainWeights(inputs.router, inputs.first[low:high], inputs.second[low:high])
    routes = unfused.make_routes(all_ids[rank], c, None, ranks)
    masked = torch.where(all_ids[rank] >= 0, weight, torch.zeros_like(weight))
    with torch.no_grad():
        return unfused.compute(inputs.x[rank], masked, routes, weights, c, None, ranks)


def gather_ids(mine: torch.Tensor, inputs: Inputs, ranks: int) -> list[torch.Tensor]:
    """Every rank's choices as it made them."""
    if ranks == 1:
        return [mine.long()]
    box: list = [None] * ranks
    dist.all_gather_object(box, mine.cpu())
    return [ids.long().to(mine.device) for ids in box]


def ffn_hidden(c: MoEConfig, rows: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Hidden activations, fp32 sums, rounded once to the layer's dtype."""
    product = rows.float() @ first.float().t()
    if c.gated:
        gate, up = product.split(c.intermediate, dim=1)
        return (activation(c.activation, gate) * up).to(rows.dtype)
    return activation(c.activation, product).to(rows.dtype)


def ffn_exact(c: MoEConfig, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """One expert in fp64, nothing rounded in between."""
    product = rows.double() @ first.double().t()
    if c.gated:
        gate, up = product.split(c.intermediate, dim=1)
        hidden = activation(c.activation, gate) * up
    else:
        hidden = activation(c.activation, product)
    return hidden @ second.double().t()
