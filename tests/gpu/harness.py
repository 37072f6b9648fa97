"""What the GPU tests share: inputs, routings, the expected content of every buffer, and the comparison.

Expected buffers are computed on the GPU, expert by expert, in fp32 from the same rounded inputs, straight from the
definition: rows expert-major, then source rank, then token; hidden and output rounded once; fp32 sum in k order.
Nothing here uses the kernel's own offsets.

Letters: S tokens of a rank, H hidden, E experts, K choices, P ranks, X local slots.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_fast import unfused
from moe_fast.buffers import Buffers
from moe_fast.engine import Engine
from moe_fast.heap import local_heap, local_heaps, symmetric_heap
from moe_fast.kernel.constants import CARRIED_ROWS, TILE_ROWS
from moe_fast.kernel.regions import heap_regions
from moe_fast.kernel.shapes import KernelShape
from moe_fast.local_ranks import LocalRanks
from moe_fast.router import router_parts
from moe_fast.routes import make_routes
from moe_fast.weights import ChainWeights
from moe_ref import balance
from moe_ref.config import MoEConfig
from moe_ref.errors import UsageError
from moe_ref.placement import Placement

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-3}
"""Relative error (Frobenius) of a buffer against fp32 arithmetic on the same rounded inputs."""
GATE_TOLERANCE = {torch.bfloat16: 1e-5, torch.float16: 1e-5, torch.float32: 3e-5}
"""The same of the gate's weights. Logits of 16-bit inputs are exact products, summed in fp32. Those of fp32 inputs are
three TF32 products each, so six times as many partial sums, and tensor cores cut sums off instead of rounding: 1.5e-5
was seen."""
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
    form: dict = field(default_factory=dict)
    """Further fields of the config: biases, groups, shared expert, ..."""
    fp32_router: bool = False
    replicas: str = "none"
    transport: str = "stores"
    layout: str = "compact"
    capacity_factor: float | None = None
    paired: bool | None = None
    """None: as a user gets it."""

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
            layout=self.layout,
            capacity_factor=self.capacity_factor,
            tile_rows=128,
            **self.form,
        )

    def __str__(self) -> str:
        act = self.activation + ("*u" if self.gated else "")
        return (
            f"H{self.hidden} D{self.intermediate} E{self.experts} K{self.top_k} {act} {self.dtype} "
            f"S{list(self.tokens)} {self.routing} {self.scheduler}"
            + "".join(f" {name}={value}" for name, value in self.form.items())
            + (" fp32 router" if self.fp32_router else "")
            + ("" if self.replicas == "none" else f" replicas={self.replicas}")
            + ("" if self.transport == "stores" else f" {self.transport}")
            + ("" if self.layout == "compact" else f" {self.layout}")
            + ("" if self.capacity_factor is None else f" capacity={self.capacity_factor}")
            + ("" if self.paired is None else " pairs" if self.paired else " single")
        )

    def placement(self, ranks: int) -> Placement:
        """Which rank holds what; on one rank there is only one way."""
        e = self.experts
        if self.replicas == "none" or ranks == 1:
            return Placement.contiguous(e, ranks)
        if self.replicas == "two":
            return Placement.from_replicas([[i % ranks, (i + 1) % ranks] for i in range(e)], ranks)
        # a third on the first two ranks, a third on one rank, a third on all ranks from the last to the first; on more
        # than two ranks on neighbours instead, and three of them, for which the kernel's tables have room at any E
        if ranks == 2:
            kinds = ([0, 1], [1], [1, 0])
            return Placement.from_replicas([kinds[i % 3] if i else [0] for i in range(e)], ranks)
        sets = [[(i + step) % ranks for step in ((0, 1), (0,), (0, -1, -2))[i % 3]] for i in range(e)]
        return Placement.from_replicas([sets[i] if i else [0] for i in range(e)], ranks)

    def shape(self, ranks: int, trace: bool = False) -> KernelShape:
        """The kernel of this case; one rank has no peer to put to."""
        transport = self.transport if ranks > 1 else "stores"
        return KernelShape.from_config(
            self.config, ranks, self.scheduler, trace, self.fp32_router, self.placement(ranks), transport, self.paired
        )


_seat: tuple[int, int] | None = None


@contextmanager
def seat(rank: int, ranks: int) -> Iterator[None]:
    """Whatever is asked for this process' rank, it is this one, of `ranks` that share its GPU."""
    global _seat
    before, _seat = _seat, (rank, ranks)
    try:
        yield
    finally:
        _seat = before


def rank_and_size() -> tuple[int, int]:
    """Place in the process group, or the seat taken; else (0, 1)."""
    if _seat is not None:
        return _seat
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


_engines: dict = {}
_groups: dict = {}


def close_engines() -> None:
    """Free every engine that is kept; collective."""
    for engine in _engines.values():
        engine.heap.close()
    for group in _groups.values():
        group.close()
    _engines.clear()
    _groups.clear()


def engine_for(case: Case, deadline_s: float = 5.0) -> Engine:
    """Engine of a case, kept: engines of one shape share buffers."""
    _, ranks = rank_and_size()
    shape = case.shape(ranks)
    key = (shape, case.max_tokens)
    if key not in _engines:
        if len(_engines) >= 6:
            close_engines()
        size = heap_regions(shape, case.max_tokens)[1]
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        heap = symmetric_heap(size, device, mapped=not shape.put) if ranks > 1 else local_heap(size, device)
        _engines[key] = Engine(shape, heap, case.max_tokens, deadline_s)
        heap.barrier()
    return _engines[key]


def group_for(case: Case, ranks: int, deadline_s: float = 5.0, blocks: int | None = None) -> LocalRanks:
    """Engines of a case on `ranks` ranks that share this GPU, kept like `engine_for`'s. blocks: of each rank."""
    shape = case.shape(ranks)
    key = (shape, case.max_tokens, blocks)
    if key not in _groups:
        if len(_groups) >= 6:
            close_engines()
        size, device = heap_regions(shape, case.max_tokens)[1], torch.device("cuda", torch.cuda.current_device())
        heaps = local_heaps(size, device, ranks)
        _groups[key] = LocalRanks([Engine(shape, heap, case.max_tokens, deadline_s, blocks) for heap in heaps])
    return _groups[key]


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
    router_bias: torch.Tensor | None
    first_bias: torch.Tensor | None
    second_bias: torch.Tensor | None
    shared: list[torch.Tensor | None]
    """Of the shared expert first, second, gate."""
    placement: Placement

    def expert_weights(self, e: int) -> tuple[torch.Tensor | None, ...]:
        """first, second, first_bias, second_bias of an expert."""
        return tuple(t if t is None else t[e] for t in (self.first, self.second, self.first_bias, self.second_bias))

    def chain(self, experts: tuple[int, ...]) -> ChainWeights:
        """As the unfused chain takes them, for a rank that holds these experts; views, if they are neighbours."""
        low, high = experts[0], experts[-1] + 1
        held: slice | torch.Tensor = slice(low, high)
        if experts != tuple(range(low, high)):
            held = torch.tensor(experts, device=self.first.device)
        first, second, first_bias, second_bias = (
            t if t is None else t[held] for t in (self.first, self.second, self.first_bias, self.second_bias)
        )
        return ChainWeights(
            self.router, first, second, self.bias, self.router_bias, first_bias, second_bias, *self.shared
        )


def launch(
    engine: Engine, inputs: Inputs, rank: int, x: torch.Tensor | None = None, weights=None, **more
) -> torch.Tensor:
    """One call of the engine with a rank's inputs; `x` and `more` (routing, out) instead of theirs.

    weights: `inputs.chain` of the rank's experts, if the caller makes many calls.
    """
    shape, placement = engine.shape, inputs.placement
    weights = weights or inputs.chain(placement.experts_of_rank[rank])
    more = {"placement": placement, **more} if shape.placed else more
    router = inputs.router
    if shape.router_parts > 1:
        router = router_parts(router, inputs.first.dtype)
    if x is None and inputs.expert is not None and inputs.weight is not None:
        more = {"expert_SK": inputs.expert[rank], "weight_SK": inputs.weight[rank], **more}
    return engine.launch(
        inputs.x[rank] if x is None else x, router, weights.up_XUH, weights.down_XHD,
        selection_bias_E=weights.selection_bias_E, router_bias_E=weights.router_bias_E,
        first_bias_XU=weights.up_bias_XU, second_bias_XH=weights.down_bias_XH, shared_first_VH=weights.shared_up_VH,
        shared_second_HW=weights.shared_down_HW, shared_gate_1H=weights.shared_gate_1H, **more,
    )  # fmt: skip


def launch_together(
    group: LocalRanks,
    inputs: Inputs,
    absent: Sequence[int] = (),
    held: Sequence[ChainWeights] | None = None,
    **more: Sequence,
) -> list[torch.Tensor]:
    """One call of ranks that share a GPU, all but the absent ones; more: of every rank what `launch` takes."""
    starts: list = []
    ranks = range(len(group.engines))
    held = held or [inputs.chain(inputs.placement.experts_of_rank[rank]) for rank in ranks]
    out = []
    for rank in ranks:
        own = {name: values[rank] for name, values in more.items()}
        mine: list = []
        out.append(launch(group.engines[rank], inputs, rank, weights=held[rank], together=mine, **own))
        starts += [] if rank in absent else mine
    group.start(starts)
    return out


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
    if case.fp32_router:
        # bits that 16-bit arithmetic would lose
        router = router.float() + torch.randn(c.experts, c.hidden, device=device, generator=g) * 1e-3
    first = normal(c.experts, c.up_rows, c.hidden, scale=c.hidden**-0.5)
    second = normal(c.experts, c.hidden, c.intermediate, scale=c.intermediate**-0.5)
    bias = torch.randn(c.experts, device=device, generator=g) * 0.1 if case.selection_bias else None
    expert = weight = None
    if case.routing != "gate":
        expert = [make_ids(case, s, rank, g, device) for rank, s in enumerate(tokens)]
        weight = [torch.rand(s, c.top_k, device=device, generator=g) for s in tokens]
    router_bias = first_bias = second_bias = None
    shared: list[torch.Tensor | None] = [None, None, None]
    if c.router_bias:
        router_bias = normal(c.experts, scale=0.5)
    if c.expert_bias:
        first_bias = normal(c.experts, c.up_rows, scale=0.5)
        second_bias = normal(c.experts, c.hidden, scale=0.5)
    if c.shared_intermediate:
        width = c.shared_intermediate
        shared[0] = normal(2 * width if c.gated else width, c.hidden, scale=c.hidden**-0.5)
        shared[1] = normal(c.hidden, width, scale=width**-0.5)
        shared[2] = normal(1, c.hidden, scale=c.hidden**-0.5) if c.shared_gate else None
    placement = case.placement(ranks)
    return Inputs(
        x, router, first, second, bias, expert, weight, router_bias, first_bias, second_bias, shared, placement
    )


def make_ids(case: Case, tokens: int, rank: int, g: torch.Generator, device: torch.device) -> torch.Tensor:
    """Expert ids [S, K] of a rank, int64, of the case's kind."""
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
    elif case.routing == "remainders":
        # Beyond one, two or three full row tiles of an expert a few rows, or a few more: of all ranks together. In this
        # order a pair of blocks meets tasks of which none, one or both carry some.
        rests = (0, CARRIED_ROWS + 2, 1, 2, 16, 17, 127, CARRIED_ROWS)
        rows = [(TILE_ROWS * (1 + e % 3) + rests[e % len(rests)] + rank) // ranks for e in range(c.experts)]
        flat = torch.repeat_interleave(torch.arange(c.experts, device=device), torch.tensor(rows, device=device))
        assert flat.numel() <= tokens * c.top_k, f"{flat.numel()} routes, {tokens} tokens"
        ids = ids.new_full((tokens * c.top_k,), -1)
        ids[torch.randperm(ids.numel(), device=device, generator=g)[: flat.numel()]] = flat
        ids = ids.view(tokens, c.top_k)
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


def reference_routing(case: Case, inputs: Inputs, p: int) -> tuple[torch.Tensor, ...]:
    """Gate in fp64 on the rounded inputs: (ids, logits, what is chosen by, tokens whose groups are no near tie)."""
    c = case.config
    logits = inputs.x[p].double() @ inputs.router.double().t()
    if inputs.router_bias is not None:
        logits = logits + inputs.router_bias.double()
    choice = logits if c.top_k_order == "before_scores" else scores_of(c, logits)
    choice = choice if inputs.bias is None else choice + inputs.bias.double()
    clear = torch.ones(len(choice), dtype=torch.bool, device=choice.device)
    if c.num_groups > 1 and len(choice):
        grouped = choice.view(len(choice), c.num_groups, -1)
        best = grouped.amax(-1) if c.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        order = best.sort(-1, descending=True)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order.indices[:, : c.top_groups], True)
        if c.top_groups < c.num_groups:
            clear = order.values[:, c.top_groups - 1] - order.values[:, c.top_groups] > 1e-5 * order.values[:, 0].abs()
        choice = choice.masked_fill(~kept.repeat_interleave(c.experts // c.num_groups, 1), float("-inf"))
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : c.top_k]
    return ids, logits, choice, clear


def scores_of(c: MoEConfig, logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1) if c.scoring == "softmax" else logits.sigmoid()


def gate_weights(case: Case, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights of chosen ids."""
    c = case.config
    if c.top_k_order == "before_scores":
        weight = scores_of(c, logits.gather(1, ids))
    else:
        weight = scores_of(c, logits).gather(1, ids)
    if case.config.renormalize:
        weight = weight / weight.sum(-1, keepdim=True).clamp_min(1e-20)
    return weight * case.config.routed_scaling


def run_case(case: Case, seed: int = 0, engine: Engine | None = None, poison: bool = True) -> dict[str, float]:
    """One call, every named buffer compared; returns the relative error of each, raises AssertionError."""
    engine = engine or engine_for(case)
    inputs = make_inputs(case, seed)
    rank, _ = rank_and_size()
    if poison:
        engine.poison()
    y = torch.full_like(inputs.x[rank], float("nan"))
    launch(engine, inputs, rank, out=y)
    engine.check()
    return compare_case(case, inputs, engine, y)


def run_together(case: Case, ranks: int, seed: int = 0, group: LocalRanks | None = None) -> dict[str, float]:
    """`run_case` of `ranks` ranks that share this GPU; of every buffer the largest relative error of any rank."""
    group = group or group_for(case, ranks)
    with seat(0, ranks):
        inputs = make_inputs(case, seed)
    group.poison()
    ys = [torch.full_like(x, float("nan")) for x in inputs.x]
    launch_together(group, inputs, out=ys)
    group.check()
    everyone = [engine.buffers(len(x)).expert_SK.long() for engine, x in zip(group.engines, inputs.x, strict=True)]
    sizes = [ids.numel() for ids in everyone]
    both = expected_results(case.config, inputs, torch.cat(inputs.x), torch.cat([ids.flatten() for ids in everyone]))
    results = list(zip(*(one.split(sizes) for one in both), strict=True))
    worst: dict[str, float] = {}
    for rank, (engine, y) in enumerate(zip(group.engines, ys, strict=True)):
        with seat(rank, ranks):
            for name, value in compare_case(case, inputs, engine, y, everyone, results[rank]).items():
                worst[name] = max(worst.get(name, 0.0), value)
    return worst


def expected_results(
    c: MoEConfig, inputs: Inputs, x: torch.Tensor, flat: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What experts make of tokens x [S, H] for the choices `flat` [S * K]: (fp32, fp64), zero for masked ones."""
    returned = torch.zeros(flat.numel(), c.hidden, device=x.device)
    exact = torch.zeros(flat.numel(), c.hidden, device=x.device, dtype=torch.float64)
    for e in range(c.experts):
        at = (flat == e).nonzero(as_tuple=True)[0]
        if at.numel():
            rows = x[at // c.top_k]
            first, second, first_bias, second_bias = inputs.expert_weights(e)
            returned[at] = ffn_hidden(c, rows, first, first_bias).float() @ second.float().t()
            if second_bias is not None:
                returned[at] += second_bias.float()
            exact[at] = ffn_exact(c, rows, first, second, first_bias, second_bias)
    return returned, exact


def compare_case(
    case: Case,
    inputs: Inputs,
    engine: Engine,
    y: torch.Tensor,
    everyone: list[torch.Tensor] | None = None,
    results: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> dict[str, float]:
    """What a call left behind on this rank, every named buffer.

    everyone: all ranks' ids; results: `expected_results` of this rank's choices; if they are here.
    """
    rank, ranks = rank_and_size()
    c, dtype = case.config, case.config.torch_dtype
    placement = case.placement(ranks)
    x = inputs.x[rank]
    got = engine.buffers(x.shape[0])
    errors: dict[str, float] = {}
    limit = TOLERANCE[dtype]

    # routing: ids agree up to ties that fp32 can't tell apart; weights belong to the chosen ids
    if inputs.expert is None:
        ids, logits, choice, clear = reference_routing(case, inputs, rank)
        mine = got.chosen_SK
        if mine.numel():
            assert mine.min() >= 0, "the gate masked a route"
            assert (mine.sort(1).values.diff(dim=1) > 0).all() if c.top_k > 1 else True, "an expert twice in a token"
            assert clear.float().mean() > 0.98, "too many near ties of groups: the case shows little"
            off_SK = torch.where(clear[:, None], choice.gather(1, ids) - choice.gather(1, mine), 0.0).abs()
            gap = off_SK.max().item()
            assert gap < 1e-5, (
                f"gate chose an expert whose score is {gap} off, in {int((off_SK > 1e-5).any(1).sum())} tokens; first: "
                f"{(off_SK > 1e-5).any(1).nonzero()[0].tolist()} {ids[(off_SK > 1e-5).any(1)][0].tolist()} chosen "
                f"{mine[(off_SK > 1e-5).any(1)][0].tolist()}"
            )
            errors["weight"] = relative(got.weight_SK, gate_weights(case, logits, mine))
            assert errors["weight"] < GATE_TOLERANCE[dtype], errors
        all_ids = everyone or gather_ids(got.expert_SK, inputs, ranks)
    else:
        assert torch.equal(got.chosen_SK, inputs.expert[rank])
        all_ids = [within_capacity(ids, c.capacity(len(ids))) for ids in inputs.expert]
    assert torch.equal(got.expert_SK, within_capacity(got.chosen_SK, c.capacity(len(x)))), "other routes were dropped"
    weight = got.weight_SK

    # counts of every rank
    want_counts = torch.stack([torch.bincount(i[i >= 0].flatten(), minlength=c.experts) for i in all_ids])
    assert torch.equal(got.counts_PE.long(), want_counts), "counts"
    if inputs.expert is not None:
        before = torch.stack([torch.bincount(i[i >= 0].flatten(), minlength=c.experts) for i in inputs.expert])
        assert torch.equal(got.before_PE.long(), before), "counts before the capacity"

    # rows, hidden: by slot, then source, then token
    method = "flow" if placement.max_replicas > 1 else "plain"
    plan = balance.schedule(want_counts.cpu().numpy(), placement, method=method)
    hidden_got, hidden_want, tiles = [], [], 0
    for expert, first_row, hidden_row, sources in segments(case, plan, all_ids, rank, (engine.memory.epoch - 1) & 1):
        rows = torch.cat([inputs.x[p][token] for p, token in sources])
        count = rows.shape[0]
        where = torch.arange(first_row, first_row + count, device=rows.device)
        wrong = (engine.readback.dispatched(got.rows_RH, where, x) != rows).any(dim=1).nonzero().flatten()
        assert not wrong.numel(), where_wrong("rows", expert, first_row, wrong, sources)
        hidden_got.append(got.hidden_RD[hidden_row : hidden_row + count])
        hidden_want.append(ffn_hidden(c, rows, *inputs.expert_weights(expert)[::2]))
        tiles += -(-count // 128)
        if relative(hidden_got[-1], hidden_want[-1]) > 10 * limit:
            difference = (hidden_got[-1].float() - hidden_want[-1].float()).norm(dim=1)
            wrong = (~(difference <= 10 * limit * hidden_want[-1].float().norm(dim=1))).nonzero().flatten()
            raise AssertionError(where_wrong("hidden", expert, hidden_row, wrong, sources))
    assert tiles == got.row_tiles, f"{got.row_tiles} row tiles, expected {tiles}"
    if hidden_got:
        got_all, want_all = torch.cat(hidden_got), torch.cat(hidden_want)
        errors["hidden"] = relative(got_all, want_all)
        assert errors["hidden"] <= limit, f"{errors}; {first_wrong(got_all, want_all, limit)}"

    # returned rows and the result, at home
    flat = all_ids[rank].reshape(-1)
    returned, exact = results or expected_results(c, inputs, x, flat)
    valid = flat >= 0
    if got.returned_NH is not None:
        errors["returned"] = relative(got.returned_NH[valid], returned[valid])
        assert errors["returned"] <= limit, f"{errors}; {first_wrong(got.returned_NH[valid], returned[valid], limit)}"
    else:
        errors |= compare_sums(case, inputs, got, plan, all_ids, rank, returned)
    w = torch.where(all_ids[rank] >= 0, weight, torch.zeros_like(weight)).double().unsqueeze(-1)
    want = (w * exact.view(-1, c.top_k, c.hidden)).sum(1)
    gate_of_shared = torch.ones(x.shape[0], 1, device=x.device, dtype=torch.float64)
    if got.shared_SH is not None:
        plain, (first, second, gate) = c.replace(interleaved=False), inputs.shared
        shared = ffn_hidden(plain, x, first).float() @ second.float().t()
        errors["shared"] = relative(got.shared_SH, shared)
        assert errors["shared"] <= limit, f"{errors}; {first_wrong(got.shared_SH, shared, limit)}"
        if gate is not None:
            gate_of_shared = torch.sigmoid(x.double() @ gate.double().t())
        want = want + gate_of_shared * ffn_exact(plain, x, first, second)
    errors["y"] = relative(y, want)
    assert errors["y"] <= limit, f"{errors}; {first_wrong(y, want, limit)}"
    # no worse than what the unfused chain makes of the same routing (which has no TF32)
    other = None if dtype == torch.float32 else unfused_result(case, inputs, all_ids, weight, plan)
    if other is not None:
        errors["unfused"] = relative(other, want)
        assert errors["y"] <= 1.5 * errors["unfused"] + 1e-6, errors
    # the combine itself, from the returned rows that are there: fp32, k order, one rounding
    total = torch.zeros(x.shape, device=x.device)
    if got.returned_NH is None:
        total = sum_of_partials(got, own_results(case, plan, all_ids, rank), weight, rank, ranks)
    for k in range(c.top_k if got.returned_NH is not None else 0):
        row = got.returned_NH.view(-1, c.top_k, c.hidden)[:, k].float() if x.shape[0] else total
        use = (all_ids[rank][:, k] >= 0).unsqueeze(-1)
        total = torch.where(use, torch.addcmul(total, row, weight[:, k : k + 1]), total)
    if got.shared_SH is not None:
        total = torch.addcmul(total, got.shared_SH.float(), gate_of_shared.float())
    errors["combine"] = relative(y, total.to(dtype))
    assert errors["combine"] <= limit / 8, errors
    return errors


def choices(plan: balance.Plan, ids: torch.Tensor, source: int, g: int):
    """Of every expert that rank `g` holds (expert, token, choice) of the routes of `source` that it computes."""
    placement = plan.placement
    for expert in placement.experts_of_rank[g]:
        j = placement.ranks_of_expert[expert].index(g)
        token, choice = (ids == expert).nonzero(as_tuple=True)
        begin = int(plan.quota_PED[source, expert, :j].sum())
        part = slice(begin, begin + int(plan.quota_PED[source, expert, j]))
        yield expert, token[part], choice[part]


def own_results(case: Case, plan: balance.Plan, all_ids: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Where among the rank's results, in the order of the row tiles, those of its own routes are: [S, K], -1 if they
    are of another rank or of none."""
    out = torch.full_like(all_ids[rank], -1)
    before = {
        expert: first + sum(len(token) for p, token in sources if p < rank)
        for expert, _, first, sources in segments(case, plan, all_ids, rank, 0)
    }
    for expert, token, choice in choices(plan, all_ids[rank], rank, rank):
        if len(token):
            out[token, choice] = before[expert] + torch.arange(len(token), device=out.device)
    return out


def sum_of_partials(got: Buffers, place: torch.Tensor, weight: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """y in fp32 from what is there: this rank's results in k order, the other ranks' partials, in rank order."""
    tokens, top_k = place.shape
    assert got.results_RH is not None
    assert got.partial_NH is not None
    own = torch.zeros(tokens, got.results_RH.shape[1], device=place.device)
    for k in range(top_k):
        row = got.results_RH[place[:, k].clamp_min(0)].float()
        own = torch.where(place[:, k : k + 1] >= 0, torch.addcmul(own, row, weight[:, k : k + 1]), own)
    total, partial_SPH = torch.zeros_like(own), got.partial_NH.view(tokens, ranks, own.shape[1])
    for g in range(ranks):
        total = total + (own if g == rank else partial_SPH[:, g].float())
    return total


def compare_sums(
    case: Case, inputs: Inputs, got: Buffers, plan: balance.Plan, all_ids: list[torch.Tensor], rank: int,
    returned: torch.Tensor,
) -> dict[str, float]:  # fmt: skip
    """Wire format "tokens": this rank's results, the partials that came back, and how many tokens were sent.

    returned: fp32 results of this rank's routes, [S * K, H].
    """
    c, (_, ranks), errors = case.config, rank_and_size(), {}
    limit = TOLERANCE[c.torch_dtype]
    tokens = all_ids[rank].shape[0]
    mine, wanted = [], []
    for expert, _, first, sources in segments(case, plan, all_ids, rank, 0):
        rows = torch.cat([inputs.x[p][token] for p, token in sources])
        up, down, up_bias, down_bias = inputs.expert_weights(expert)
        out = ffn_hidden(c, rows, up, up_bias).float() @ down.float().t()
        wanted.append(out if down_bias is None else out + down_bias.float())
        mine.append(got.results_RH[first : first + len(rows)])
    if mine:
        mine, wanted = torch.cat(mine), torch.cat(wanted)
        errors["results"] = relative(mine, wanted)
        assert errors["results"] <= limit, f"{errors}; {first_wrong(mine, wanted, limit)}"
    sent = torch.zeros(ranks, ranks, dtype=torch.int32)
    for p in range(ranks):
        for g in range(ranks):
            there = [token for _, token, _ in choices(plan, all_ids[p], p, g)]
            sent[p, g] = len(torch.cat(there).unique()) if there else 0
    assert torch.equal(got.sent_PG.cpu(), sent), f"tokens sent: {got.sent_PG.tolist()}, expected {sent.tolist()}"
    want = torch.zeros(tokens, ranks, c.hidden, device=returned.device)
    for g in range(ranks):
        if g != rank:
            for _, token, choice in choices(plan, all_ids[rank], rank, g):
                part = got.weight_SK[token, choice].unsqueeze(1) * returned[token * c.top_k + choice]
                want[:, g].index_add_(0, token, part)
    want = want.view(-1, c.hidden)
    errors["partial"] = relative(got.partial_NH, want)
    assert errors["partial"] <= limit, f"{errors}; {first_wrong(got.partial_NH, want, limit)}"
    return errors


def within_capacity(ids: torch.Tensor, capacity: int | None) -> torch.Tensor:
    """Expert ids [S, K] with -1 for each beyond the first `capacity` of its expert, in token order, then choice."""
    if capacity is None:
        return ids
    kept = ids.flatten().clone()
    for expert in kept[kept >= 0].unique().tolist():
        kept[(kept == expert).nonzero().flatten()[capacity:]] = -1
    return kept.view_as(ids)


def segments(
    case: Case, plan: balance.Plan, all_ids: list[torch.Tensor], rank: int, side: int
) -> list[tuple[int, int, int, list[tuple[int, torch.Tensor]]]]:
    """(expert, first row, first hidden row, [(source, tokens)]) of every stretch of rows that a rank computes.

    Straight from the plan's rule: a source's rows for an expert fill its replicas in order, each up to its quota. In
    the fixed layout every source has a stretch of its own, at L[source, round 0, side, slot].
    """
    out, first, placement = [], 0, plan.placement
    slots = placement.slots
    limit = case.config.capacity(case.max_tokens)
    limit = -(-(case.max_tokens if limit is None else limit) // 128) * 128
    for slot, expert in enumerate(placement.experts_of_rank[rank]):
        j = placement.ranks_of_expert[expert].index(rank)
        sources = []
        for p, ids in enumerate(all_ids):
            token, _ = (ids == expert).nonzero(as_tuple=True)
            begin = int(plan.quota_PED[p, expert, :j].sum())
            sources.append((p, token[begin : begin + int(plan.quota_PED[p, expert, j])]))
        parts = [[source] for source in sources] if case.layout == "fixed" else [sources]
        for part in parts:
            count = sum(len(token) for _, token in part)
            place = (((part[0][0] * 2 + 0) * 2 + side) * slots + slot) * limit if case.layout == "fixed" else first
            if count:
                out.append((expert, place, first, part))
            first += -(-count // 128) * 128
    return out


def where_wrong(name: str, expert: int, first_row: int, wrong: torch.Tensor, sources: list) -> str:
    """The first wrong row of a stretch, in words. wrong: positions in the stretch."""
    at = int(wrong[0])
    origin = [(p, int(t)) for p, token in sources for t in token.tolist()]
    source, token = origin[at] if at < len(origin) else (-1, -1)
    return (
        f"{name}: {len(wrong)} wrong rows of expert {expert}, the first is row {at % 128} of tile "
        f"{(first_row + at) // 128} (buffer row {first_row + at}; token {token} of rank {source})"
    )


def unfused_result(
    case: Case, inputs: Inputs, all_ids: list[torch.Tensor], weight: torch.Tensor, plan: balance.Plan
) -> torch.Tensor | None:
    """The unfused chain's result for the kernel's routing; None where a rank has no token or row."""
    rank, ranks = rank_and_size()
    c = case.config
    if not plan.rank_loads.all() or any(x.shape[0] == 0 for x in inputs.x):
        return None
    # of ranks that share a GPU each computes its tokens' results alone
    held = plan.placement.experts_of_rank[rank] if _seat is None else tuple(range(c.experts))
    others = ranks if _seat is None else 1
    weights = inputs.chain(held)
    planner = None if case.replicas == "none" or others == 1 else lambda counts: plan
    routes = make_routes(all_ids[rank], c, None, others, planner)
    masked = torch.where(all_ids[rank] >= 0, weight, torch.zeros_like(weight))
    with torch.no_grad():
        return unfused.compute(inputs.x[rank], masked, routes, weights, c, None, others)


def gather_ids(mine: torch.Tensor, inputs: Inputs, ranks: int) -> list[torch.Tensor]:
    """Every rank's choices as it made them."""
    if ranks == 1:
        return [mine.long()]
    box: list = [None] * ranks
    dist.all_gather_object(box, mine.cpu())
    return [ids.long().to(mine.device) for ids in box]


def hidden_of(c: MoEConfig, product: torch.Tensor) -> torch.Tensor:
    """The activation of a first product, in its dtype."""
    if not c.gated:
        return activation(c.activation, product)
    gate, up = (product[:, 0::2], product[:, 1::2]) if c.interleaved else product.chunk(2, dim=1)
    if c.activation == "clamped_swiglu":
        gate, up = gate.clamp(max=c.clamp_limit), up.clamp(-c.clamp_limit, c.clamp_limit)
        return (up + 1) * gate * torch.sigmoid(c.clamp_alpha * gate)
    return activation(c.activation, gate) * up


def ffn_hidden(c: MoEConfig, rows: torch.Tensor, first: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Hidden activations, fp32 sums, rounded once to the layer's dtype."""
    product = rows.float() @ first.float().t()
    return hidden_of(c, product if bias is None else product + bias.float()).to(rows.dtype)


def ffn_exact(
    c: MoEConfig,
    rows: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    first_bias: torch.Tensor | None = None,
    second_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One expert in fp64, nothing rounded in between."""
    product = rows.double() @ first.double().t()
    out = hidden_of(c, product if first_bias is None else product + first_bias.double()) @ second.double().t()
    return out if second_bias is None else out + second_bias.double()


def first_wrong(actual: torch.Tensor, expected: torch.Tensor, limit: float) -> str:
    """Where two matrices first differ by more than they may: the tile of 64 rows and 64 columns, and how many do."""
    scale = float(expected.double().norm()) / max(1, expected.numel()) ** 0.5
    wrong = ~((actual.double() - expected.double()).abs() <= 30 * limit * scale + limit * expected.double().abs())
    if not bool(wrong.any()):
        return "no single element stands out"
    tiles = [(int(r) // 64, int(h) // 64) for r, h in wrong.nonzero()[:100000].tolist()]
    r, h = wrong.nonzero()[0].tolist()
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements wrong, in {len(set(tiles))} tiles of 64 x 64, first "
        f"{sorted(set(tiles))[:6]}; [{r}, {h}] is {float(actual[r, h])}, expected {float(expected[r, h])}"
    )


def refusal(attempt: Callable[[], object], wanted: str) -> str:
    """What an attempt is refused with, which must say `wanted`."""
    message = None
    try:
        attempt()
    except UsageError as error:
        message = str(error)
    assert message is not None, f"nothing was refused, expected something about {wanted}"
    assert wanted in message, message
    return message
