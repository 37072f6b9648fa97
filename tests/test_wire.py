"""The wire format "tokens": against the definition, row by row what crosses, and what it shares with "routes"."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import FAMILIES, dense, family, largest_error

from moe_ref import MoEConfig, MoELayer, Placement, Routing, SimulatedWorld, cases, wire
from moe_ref.balance.plan import Plan
from moe_ref.definition import relative_error
from moe_ref.diff import compare
from moe_ref.layout import CompactLayout
from moe_ref.main_job import Job, run_job

BASE = MoEConfig(hidden=32, intermediate=48, experts=12, top_k=5, wire_format="tokens")
RING = [[e % 4, (e + 1) % 4] for e in range(12)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_forward_and_gradients(name: str, ranks: int) -> None:
    config = family(name, dtype="float64", wire_format="tokens")
    layer = MoELayer(config, world=ranks, seed=3)
    x = cases.make_tokens(57, config, 1).requires_grad_()
    assert largest_error(layer, x, None, [x, *layer.parameters()]) <= 1e-12


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("replicas", [None, RING])
def test_routing_handed_in(kind: str, replicas) -> None:
    """Masked, repeated and one-sided routes, with and without replicas; the weights' gradients, too."""
    config = BASE.replace(dtype="float64", expert_bias=True)
    placement = None if replicas is None else Placement.from_replicas(replicas, 4)
    layer = MoELayer(config, world=4, placement=placement, seed=1)
    x = cases.make_tokens(41, config, 2).requires_grad_()
    routing = cases.make_routing(kind, 41, config, 3, layer.placement)
    weight = routing.weight_SK.clone().requires_grad_()
    assert largest_error(layer, x, Routing(routing.expert_SK, weight), [x, weight]) <= 1e-12


def test_gradcheck() -> None:
    config = MoEConfig(hidden=3, intermediate=4, experts=4, top_k=3, dtype="float64", wire_format="tokens")
    layer = MoELayer(config, world=2, seed=2)
    x = cases.make_tokens(5, config, 2).requires_grad_()
    routing = layer.gate(x)
    fixed = Routing(routing.expert_SK, routing.weight_SK.detach())
    assert torch.autograd.gradcheck(lambda x: layer(x, routing=fixed), (x,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [[7, 0, 30, 1], [16, 16, 16, 16]])
def test_sum_is_the_stated_one(dtype: str, sizes: list[int], one_thread) -> None:
    """From the result rows of "routes": fp32 in k order for each rank, others rounded, in rank order, same bits."""
    config = BASE.replace(dtype=dtype, shared_intermediate=24)
    layer = MoELayer(config, world=4, seed=5)
    routes = MoELayer(config.replace(wire_format="routes"), world=4, seed=5)
    xs = [cases.make_tokens(size, config, rank) for rank, size in enumerate(sizes)]
    with torch.no_grad():
        record = layer._backend.forward(layer, xs, None, keep=True)
        other = routes._backend.forward(routes, xs, None, keep=True)
        for rank, x in enumerate(xs):
            routing = record.routing[rank]
            rank_SK = routing.expert_SK // 3
            rows_SKH = other.returned_NH[rank].view(*routing.expert_SK.shape, x.shape[1])
            want, crossed = torch.zeros(x.shape), torch.zeros(x.shape[0], 4, x.shape[1], dtype=x.dtype)
            for s in range(x.shape[0]):
                for g in range(4):
                    choices = [k for k in range(config.top_k) if int(rank_SK[s, k]) == g]
                    partial = torch.zeros(x.shape[1])
                    for k in choices:
                        partial = partial + routing.weight_SK[s, k] * rows_SKH[s, k].float()
                    if g != rank:
                        crossed[s, g] = partial.to(x.dtype)
                        partial = crossed[s, g].float()
                    want[s] += partial
            want = (want + layer.shared(x).float()).to(x.dtype)
            assert torch.equal(record.partial_NH[rank], crossed.view(-1, x.shape[1]))
            assert torch.equal(record.y_SH[rank], want)
            assert relative_error(other.y_SH[rank], want) <= {"float32": 1e-6, "bfloat16": 6e-3, "float16": 8e-4}[dtype]


def test_rows_and_products_are_those_of_routes() -> None:
    """Between dispatch and return nothing differs, bit by bit, the heap's padding included."""
    xs = [cases.make_tokens(size, BASE, size) for size in (40, 3, 0, 17)]
    records = []
    for name in ("tokens", "routes"):
        layer = MoELayer(BASE.replace(wire_format=name), world=4, seed=4)
        with torch.no_grad():
            records.append(layer._backend.forward(layer, xs, None, keep=True))
    for name in ("rows_NH", "hidden_ND", "output_NH"):
        for a, b in zip(*(getattr(record, name) for record in records), strict=True):
            assert torch.equal(a, b)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=4),
    st.sampled_from(sorted(cases.KINDS)),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_what_is_sent(sizes: list[int], kind: str, placed: bool, seed: int) -> None:
    """Every (token, rank) with a route once, in the order of its first route; every route's heap row exactly once."""
    ranks = len(sizes)
    placement = (
        Placement.from_replicas([[e % ranks, (e + 1) % ranks] for e in range(12)], ranks)
        if placed
        else Placement.contiguous(12, ranks)
    )
    routings = [cases.make_routing(kind, s, BASE, seed + p, placement).expert_SK for p, s in enumerate(sizes)]
    counts = np.stack([np.bincount(r[r >= 0].flatten().numpy(), minlength=12) for r in routings])
    layer = MoELayer(BASE, world=ranks, placement=placement)
    plan = layer.make_plan(counts)
    layout = CompactLayout.from_plan(plan, 16)
    written: list[list[int]] = [[] for _ in range(ranks)]
    for p, expert_SK in enumerate(routings):
        token_M, place_MK, sizes_G = wire.sent_tokens(expert_SK, plan, layout, p)
        assert sizes_G.sum() == len(token_M) == len(place_MK)
        assert (sizes_G == wire.count_tokens(expert_SK, plan, p)).all()
        assert ((place_MK >= 0).sum(axis=1) > 0).all(), "a token was sent for nothing"
        for g, (tokens, places) in enumerate(
            zip(*(np.split(v, np.cumsum(sizes_G)[:-1]) for v in (token_M, place_MK)), strict=True)
        ):
            assert len(set(tokens.tolist())) == len(tokens), "a token twice to one rank"
            first = np.where(places >= 0, places, 1 << 40).min(axis=1)
            assert (np.diff(first) > 0).all(), "not in the order of the first routes"
            written[g] += places[places >= 0].tolist()
    for g in range(ranks):
        assert sorted(written[g]) == layout.held_rows(g).tolist()


def test_bytes_are_counted() -> None:
    """Every token has all four experts of both ranks: one row to the other rank instead of four."""
    config = MoEConfig(hidden=32, intermediate=16, experts=8, top_k=8)
    seen = {}
    for name in ("routes", "tokens"):
        layer = MoELayer(config.replace(wire_format=name), world=2)
        x = cases.make_tokens(20, config, 1)
        _, stats = layer(x, return_stats=True)
        seen[name] = stats.bytes_local, stats.bytes_remote
        assert stats.rank_load.tolist() == [80, 80]
    row = config.row_bytes
    assert seen == {"routes": (80 * row, 80 * row), "tokens": (20 * row, 20 * row)}


def test_capacity_drops_cross_in_no_format() -> None:
    config = BASE.replace(capacity_factor=0.5, dtype="float64")
    layer = MoELayer(config, world=4, seed=6)
    x = cases.make_tokens(60, config, 4)
    y, stats = layer(x, return_stats=True)
    assert stats.dropped > 0
    record = stats.record
    kept = [r.expert_SK for r in record.routing]
    sent = np.stack([wire.count_tokens(ids, record.plan, p) for p, ids in enumerate(kept)])
    assert (sent == record.sent_PG).all()
    whole = Routing(torch.cat(kept), torch.cat([r.weight_SK for r in record.routing]))
    assert relative_error(y, dense(layer, x, whole)) <= 1e-12


def test_refused_with_the_fixed_layout() -> None:
    with pytest.raises(ValueError, match=r"wire_format 'tokens'.*layout='compact'"):
        BASE.replace(layout="fixed")
    with pytest.raises(ValueError, match="wire_format is 'rows', expected one of routes, tokens"):
        BASE.replace(wire_format="rows")


def test_one_rank_is_the_same_layer() -> None:
    x = cases.make_tokens(33, BASE, 1)
    assert torch.equal(MoELayer(BASE)(x), MoELayer(BASE.replace(wire_format="routes"))(x))


def test_compared_stage_by_stage() -> None:
    """The harness sees the partial sums, starts in the middle, and names a wrong one."""
    layer = MoELayer(BASE, world=3)
    xs = [cases.make_tokens(20, BASE, rank) for rank in range(3)]
    report = compare("ref", "ref", layer, xs)
    assert report.ok
    assert [b.buffer for b in report.buffers if b.stage == "return"] == ["partial_NH"]
    assert compare("ref", "ref", layer, xs, start_from="return").ok

    class Wrong(type(layer._backend)):
        name = "wrong"

        def forward(self, *arguments, **more):
            record = super().forward(*arguments, **more)
            record.partial_NH[1][7 * 3 + 2, 5] += 1
            return record

    found = compare(Wrong(), "ref", layer, xs)
    assert not found.ok
    assert (found.first.buffer, found.first.rank, found.first.row, found.first.column) == ("partial_NH", 1, 23, 5)


def test_plan_counts_are_not_needed() -> None:
    """What is sent is a function of the rank's own routing and the plan, whatever other ranks hold."""
    ids = torch.tensor([[0, 1, 2, 3, 4], [6, 7, 8, 9, 10], [0, 11, -1, -1, 5]])
    placement = Placement.contiguous(12, 2)
    counts = np.stack([np.bincount(ids[ids >= 0].flatten().numpy(), minlength=12)] * 2)
    for other in (1, 3):
        scaled = np.stack([counts[0], counts[1] * other])
        assert wire.count_tokens(ids, Plan.plain(scaled, placement), 0).tolist() == [2, 2]


def test_the_job_reports_both_formats() -> None:
    """Same loads, as many rows as were sent, and correct; "tokens" sends fewer."""
    found = {name: run_job(Job(tokens=64, wire_format=name), SimulatedWorld(2)) for name in ("routes", "tokens")}
    row = found["tokens"].config.row_bytes
    for name, report in found.items():
        assert report.correct
        assert report.values["wire_format"] == name
        assert report.values["rows_remote"] == found["routes"].values["rows_remote"]
        assert report.values["bytes_remote"] == report.values["rows_remote"][name] * row
    assert found["tokens"].values["rows_remote"]["tokens"] < found["routes"].values["rows_remote"]["routes"]
