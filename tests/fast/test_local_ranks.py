"""Several ranks on one GPU, without one: who gets which blocks, memory and weights, and what is launched when.

Engines and layers are the real ones, on the CPU; a stand-in for the compiled function reads what a launch hands over at
the addresses it is told, and does the layer's arithmetic with it once every rank has been launched.
"""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_fast import backend, call, engine, heap, local_ranks
from moe_fast.blocks import LEAST_BLOCKS, blocks_per_rank
from moe_fast.engine import Engine
from moe_fast.failures import STATUS, MegakernelInputError, MegakernelTimeout
from moe_fast.heap import ALIGNMENT, Heap, local_heaps
from moe_fast.kernel.constants import SCHEDULERS, Status
from moe_fast.kernel.regions import heap_regions, workspace_regions
from moe_fast.kernel.shapes import KernelShape
from moe_fast.launching import in_kernel, rank_weights
from moe_fast.layers import is_placed
from moe_fast.local_ranks import LocalRanks, side_by_side, where_held
from moe_fast.router import router_operand
from moe_fast.weights import layer_weights
from moe_ref import MoEConfig, MoELayer, SimulatedWorld, cases
from moe_ref.errors import UsageError
from moe_ref.experts import gemm0, gemm1
from moe_ref.placement import Placement
from moe_ref.train.job import TrainJob, training_steps

CPU = torch.device("cpu")
CONFIG = MoEConfig(64, 32, 6, 2, dtype="float32", max_tokens=64)


@pytest.mark.parametrize(("ranks", "blocks"), [(1, 132), (2, 66), (3, 44), (8, 16), (26, 5)])
def test_ranks_share_the_multiprocessors(ranks, blocks):
    assert blocks_per_rank(132, ranks, "spare_warps") == blocks
    assert ranks * blocks <= 132


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_too_many_ranks_are_refused_with_the_most_there_can_be(scheduler):
    most = 132 // LEAST_BLOCKS[scheduler]
    assert blocks_per_rank(132, most, scheduler) == LEAST_BLOCKS[scheduler]
    with pytest.raises(UsageError, match=rf"{most + 1} ranks on a GPU of 132 SMs.*at most {most} ranks"):
        blocks_per_rank(132, most + 1, scheduler)


def test_heaps_of_one_gpu_lie_side_by_side():
    """Zeroed, apart, each as large as asked and where tiles may begin; every rank knows where all of them are."""
    heaps = local_heaps(5000, CPU, 3)
    spans = [(one.base, one.base + one.size) for one in heaps]
    assert all(end - begin == 5000 for begin, end in spans)
    assert all(a[1] <= b[0] and (b[0] - a[0]) % ALIGNMENT == 0 for a, b in pairwise(spans))
    for rank, one in enumerate(heaps):
        assert (one.rank, one.ranks, one.on_one_gpu) == (rank, 3, True)
        assert one.peers.tolist() == [begin for begin, _ in spans]
        assert not one.memory.any()
        # nobody else to meet, nothing of NVSHMEM's to give back
        one.barrier()
        one.close()
    assert not local_heaps(16, CPU, 1)[0].on_one_gpu


def test_a_heap_begins_where_its_regions_may():
    """Regions are laid out in a heap on multiples of the same number of bytes as heaps in an allocation."""
    shape = KernelShape.from_config(CONFIG, 3)
    layouts = heap_regions(shape, 64)[0], workspace_regions(shape, 64, 132)[0]
    offsets = [region.offset for layout in layouts for region in layout.values()]
    assert math.gcd(*offsets) == ALIGNMENT


def test_heaps_that_do_not_fit_are_refused(monkeypatch):
    def full(*sizes, **more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(heap.torch, "zeros", full)
    with pytest.raises(UsageError, match=r"4 ranks on one GPU need 4 symmetric heaps of 123 bytes.*lower max_tokens"):
        local_heaps(123, CPU, 4)


def test_experts_in_blocks_are_slices_others_are_looked_up():
    assert where_held((2, 3, 4), CPU) == slice(2, 5)
    assert where_held((), CPU) == slice(0, 0)
    found = where_held((4, 2), CPU)
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [4, 2]


# --- launches ----------------------------------------------------------------------------------------------------


class Streams:
    """The device's streams as a log of what was asked of them, and the kernels that wait for each other."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.pending: list[tuple[dict, dict]] = []
        self.kernel: Any = None
        self.capturing, self.count = False, 0
        self.caller = self.stream(None)

    def stream(self, device: Any) -> Any:
        number = self.count
        self.count += 1

        def record() -> str:
            self.log.append(("record", number))
            return f"{number}.{len(self.log)}"

        def wait(event: str) -> None:
            if number == 0 and self.pending:
                # the caller waits: by now every kernel must have begun
                calls, self.pending = self.pending, []
                self.kernel(calls)
            self.log.append(("wait", number, event))

        return SimpleNamespace(record_event=record, wait_event=wait, cuda_stream=number, synchronize=lambda: None)


@pytest.fixture
def streams(monkeypatch):
    """A GPU of 132 SMs without one, on the CPU."""
    made = Streams()

    class Call:
        def __init__(self, function: Any, fixed: dict[str, int]) -> None:
            self.fixed = fixed

        def __call__(self, stream: int, values: tuple[int, ...]) -> None:
            made.log.append(("launch", stream, self.fixed["rank"]))
            made.pending.append((self.fixed, dict(zip(call.CHANGING, (stream, *values), strict=True))))

    plain = torch.zeros
    monkeypatch.setattr(engine.torch, "zeros", lambda *a, pin_memory=False, **more: plain(*a, **more))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made.caller)
    monkeypatch.setattr(torch.cuda, "Stream", made.stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(engine.compiler, "load", lambda shape: None)
    monkeypatch.setattr(engine, "Call", Call)
    monkeypatch.setattr(local_ranks, "_streams", {})
    monkeypatch.setattr(local_ranks, "_last", {})
    return made


def group_of(layer: MoELayer, scheduler: str = "spare_warps") -> LocalRanks:
    ranks = layer.world.num_ranks
    shape = KernelShape.from_config(layer.config, ranks, scheduler, placement=layer.placement)
    heaps = local_heaps(heap_regions(shape, layer.config.max_tokens)[1], CPU, ranks)
    return LocalRanks([Engine(shape, one, layer.config.max_tokens) for one in heaps])


def test_every_kernel_is_launched_before_anything_waits_for_one(streams):
    """Fork, all launches, join; the next group, called on another stream, begins after it."""
    starts = [lambda stream, rank=rank: streams.log.append(("launch", stream, rank)) for rank in range(3)]
    side_by_side(starts, CPU)
    kinds = [entry[0] for entry in streams.log]
    assert kinds == ["record"] + ["wait"] * 3 + ["launch"] * 3 + ["record"] * 3 + ["wait"] * 3 + ["record"]
    assert streams.log[0] == ("record", 0)
    assert {entry[1:] for entry in streams.log[1:4]} == {(n, "0.1") for n in (1, 2, 3)}
    assert [entry[1:] for entry in streams.log[4:7]] == [(1, 0), (2, 1), (3, 2)]
    assert [entry[1] for entry in streams.log[7:10]] == [1, 2, 3]
    assert {entry[1] for entry in streams.log[10:13]} == {0}
    ended = f"0.{len(streams.log)}"
    streams.log.clear()
    streams.caller = streams.stream(None)
    side_by_side(starts[:2], CPU)
    for stream in (1, 2):
        assert ("wait", stream, ended) in streams.log[: streams.log.index(("launch", 1, 0))]


def test_a_capture_knows_nothing_of_what_ran_before(streams):
    side_by_side([lambda stream: None] * 2, CPU)
    before = dict(local_ranks._last)
    streams.log.clear()
    streams.capturing = True
    side_by_side([lambda stream: None] * 2, CPU)
    waited = [entry for entry in streams.log if entry[0] == "wait" and entry[1] in (1, 2)]
    assert len(waited) == 2
    assert local_ranks._last == before


def test_a_launch_that_fails_leaves_the_streams_joined(streams):
    def fail(stream):
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        side_by_side([lambda stream: streams.log.append(("launch", stream, 0)), fail], CPU)
    assert [entry[0] for entry in streams.log[-3:]] == ["wait", "wait", "record"]


def test_blocking_launches_are_refused(streams, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(UsageError, match=r"CUDA_LAUNCH_BLOCKING=1 .* 2 ranks"):
        side_by_side([lambda stream: None] * 2, CPU)
    assert not streams.log


def test_blocks_and_transport_of_an_engine(streams):
    shape = KernelShape.from_config(CONFIG, 2, "spare_warps", paired=False)
    size = heap_regions(shape, 64)[1]
    first, second = local_heaps(size, CPU, 2)
    assert Engine(shape, first, 64).blocks == 66
    paired = replace(shape, paired=True)
    assert [Engine(paired, first, 64, blocks=blocks).blocks for blocks in (66, 33, 6)] == [66, 32, 6]
    with pytest.raises(UsageError, match=r"5 blocks: .*needs at least 6"):
        Engine(paired, first, 64, blocks=5)
    assert Engine(shape, second, 64, blocks=5)._fixed_arguments()["grid"] == 5
    for blocks in (4, 67):
        with pytest.raises(UsageError, match=rf"{blocks} blocks .* expected 5 to 66"):
            Engine(shape, first, 64, blocks=blocks)
    # a GPU of its own
    assert Engine(shape, Heap(first.memory, first.peers, 0, 2), 64).blocks == 132
    put = KernelShape.from_config(CONFIG, 2, "spare_warps", transport="put_signal")
    with pytest.raises(UsageError, match=r"put_signal.*between GPUs"):
        Engine(put, local_heaps(heap_regions(put, 64)[1], CPU, 2)[0], 64)


# --- layers ------------------------------------------------------------------------------------------------------


def at(address: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tensor at an address."""
    count = int(torch.Size(shape).numel())
    if not count:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def arithmetic_of(layer: MoELayer) -> Any:
    """What the kernels of all ranks do together, from the addresses that their launches were handed."""
    config, placement = layer.config, layer.placement

    def kernel(calls: list[tuple[dict, dict]]) -> None:
        assert [fixed["rank"] for fixed, _ in calls] == list(range(placement.num_ranks))
        assert len({changing["router"] for _, changing in calls}) == 1
        for fixed, changing in calls:
            tokens = changing["tokens"]
            x = at(changing["x"], tokens, config.hidden)
            if changing["given"]:
                ids = at(changing["given_expert"], tokens, config.top_k, dtype=torch.int64)
                weight = at(changing["given_weight"], tokens, config.top_k)
            else:
                routing = layer.gate(x)
                ids, weight = routing.expert_SK, routing.weight_SK
            at(fixed["expert"], tokens, config.top_k, dtype=torch.int32).copy_(ids)
            y = at(changing["y"], tokens, config.hidden)
            y.zero_()
            for token, k in (ids >= 0).nonzero().tolist():
                # the last replica: every one of them must have been handed the expert
                rank = placement.ranks_of_expert[int(ids[token, k])][-1]
                slot = placement.experts_of_rank[rank].index(int(ids[token, k]))
                there = calls[rank][1]
                assert slot < there["slots"] == len(placement.experts_of_rank[rank])
                weights = SimpleNamespace(
                    up_UH=at(there["first"], there["slots"], config.up_rows, config.hidden)[slot],
                    down_HD=at(there["second"], there["slots"], config.hidden, config.intermediate)[slot],
                    up_bias_U=at(there["first_bias"], there["slots"], config.up_rows)[slot],
                    down_bias_H=at(there["second_bias"], there["slots"], config.hidden)[slot],
                )
                hidden = gemm0(x[token : token + 1], weights, config)
                y[token] += weight[token, k] * gemm1(hidden, weights, config)[0]

    return kernel


LAYERS = {
    "blocks": (3, None),
    "blocks of unequal size": (4, None),
    "replicas": (3, [[0, 1], [2], [1, 0], [2, 1, 0], [0], [1, 2]]),
}


@pytest.fixture(params=list(LAYERS))
def layer(request, streams, monkeypatch):
    ranks, sets = LAYERS[request.param]
    placement = None if sets is None else Placement.from_replicas(sets, ranks)
    config = CONFIG.replace(expert_bias=True)
    made = MoELayer(config, world=ranks, placement=placement, seed=3)
    group = group_of(made)
    streams.kernel = arithmetic_of(made)
    monkeypatch.setattr(backend, "engine_for", lambda layer, router: group)
    monkeypatch.setattr(backend.FusedBackend, "unavailable", lambda self: None)
    return made


SIZES = (40, 0, 7, 64)


def tokens_of(layer: MoELayer) -> list[torch.Tensor]:
    return [cases.make_tokens(SIZES[rank], layer.config, rank) for rank in range(layer.world.num_ranks)]


@pytest.mark.parametrize("kind", ["gate", "masked"])
def test_each_rank_gets_its_tokens_and_its_experts(layer, kind):
    """A layer on simulated ranks, some without tokens, is what the reference makes of it."""
    xs = tokens_of(layer)
    routing = None
    if kind != "gate":
        routing = [cases.make_routing(kind, len(x), layer.config, i) for i, x in enumerate(xs)]
    with torch.no_grad():
        want = layer(xs, routing=routing)
        layer.backend = "fused"
        got = layer(xs, routing=routing)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [False, True])
def test_gradients_are_the_references(layer, given):
    """Of tokens, of routing weights that were handed in, and of every parameter."""
    xs, found = tokens_of(layer), {}
    made = [cases.make_routing("masked", len(x), layer.config, i) for i, x in enumerate(xs)]
    for name in ("ref", "fused"):
        layer.backend = name
        layer.zero_grad()
        inputs = [x.clone().requires_grad_(True) for x in xs]
        weights = [one.weight_SK.clone().requires_grad_(True) for one in made]
        routing = None
        if given:
            routing = [type(one)(one.expert_SK, weight) for one, weight in zip(made, weights, strict=True)]
        ys = layer(inputs, routing=routing)
        torch.autograd.backward(ys, [torch.linspace(-1, 1, y.numel()).view(y.shape) for y in ys])
        found[name] = {f"x {i}": x.grad for i, x in enumerate(inputs) if len(x)}
        found[name] |= {f"weight {i}": w.grad for i, w in enumerate(weights) if given and len(w)}
        found[name] |= {key: value.grad for key, value in layer.named_parameters()}
    assert found["ref"].keys() == found["fused"].keys()
    for name, want in found["ref"].items():
        if given and name == "router.weight":
            assert want is None
            assert found["fused"][name] is None or not found["fused"][name].any()
        else:
            torch.testing.assert_close(found["fused"][name], want, rtol=1e-3, atol=1e-5, msg=name)


def test_gradients_of_gradients_are_refused(layer):
    xs = [x.requires_grad_(True) for x in tokens_of(layer)]
    layer.backend = "fused"
    first = torch.autograd.grad(sum(y.square().sum() for y in layer(xs)), xs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_one_rank_has_its_experts_in_blocks_however_it_is_placed(streams):
    """What its kernel is handed as they lie are all experts, in the order of its slots."""
    placement = Placement.from_replicas([[0]] * 6, 1)
    assert placement.in_blocks
    layer = MoELayer(CONFIG, world=1, placement=placement)
    assert layer.held_experts == placement.experts_of_rank[0] == tuple(range(6))
    assert not is_placed(layer)
    assert not group_of(layer).shape.placed


def test_experts_in_blocks_are_not_copied(streams):
    layer = MoELayer(CONFIG, world=4)
    parts = rank_weights(group_of(layer), layer, layer_weights(layer))
    begins = [0, 2, 4, 5]
    size = layer.up_parameter[0].numel() * 4
    for first, part in zip(begins, parts, strict=True):
        assert part.up_XUH.data_ptr() == layer.up_parameter.data_ptr() + first * size
        assert part.up_XUH.is_contiguous()
        assert part.down_XHD.data_ptr() == layer.down_proj[first].data_ptr()


@pytest.mark.parametrize("layer", ["replicas"], indirect=True)
def test_a_plan_of_the_host_reaches_every_rank(layer, streams):
    """A planner that the kernel doesn't have: gate, counts of all ranks and plan come before the first launch."""
    asked, kernel = [], streams.kernel
    layer.schedule_method = "lp"
    plan = layer.make_plan
    layer.make_plan = lambda counts: asked.append(counts) or plan(counts)

    def handed(calls):
        quotas = {changing["quota"] for _, changing in calls}
        assert len(quotas) == 1
        shape = asked[0].shape[0], 6, layer.placement.max_replicas
        quota = at(quotas.pop(), *shape, dtype=torch.int32)
        assert torch.equal(quota.sum(2), torch.from_numpy(asked[0]).int())
        assert all(changing["planned"] == changing["given"] == 1 for _, changing in calls)
        kernel(calls)

    xs = tokens_of(layer)
    with torch.no_grad():
        want = layer(xs)
        asked.clear()
        streams.kernel, layer.backend = handed, "fused"
        got = layer(xs)
    assert [counts.sum() for counts in asked] == [2 * sum(len(x) for x in xs)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mode", "group_size"), [("scheduled", None), ("scheduled", 2), ("eplb", None)])
def test_training_leaves_scheduling_to_the_kernel(mode, group_size, monkeypatch):
    """Of all ranks as one group; other plans come from the host."""
    monkeypatch.setattr(backend.FusedBackend, "unavailable", lambda self: None)
    job = TrainJob(backend="fused", dtype="bfloat16", balance=0.0, balancing=mode, group_size=group_size)
    steps = training_steps(job, SimulatedWorld(4))
    _, training = next(steps)
    assert all(is_placed(layer) and layer.backend == "fused" for layer in training.layers.values())
    found = {in_kernel(layer) for layer in training.layers.values()}
    assert found == {mode == "scheduled" and group_size is None}
    steps.close()


def test_nothing_is_launched_unless_every_rank_can_be(streams):
    """The second rank brings too many tokens: the first one isn't left waiting for it."""
    layer = MoELayer(CONFIG, world=2)
    group = group_of(layer)
    held, starts = rank_weights(group, layer, layer_weights(layer)), []
    router = router_operand(layer, layer.router.weight)
    launches = [
        lambda size=size, one=one, own=own: one.launch(
            torch.zeros(size, 64), router, own.up_XUH, own.down_XHD, together=starts
        )
        for size, one, own in zip((3, 65), group.engines, held, strict=True)
    ]
    launches[0]()
    with pytest.raises(UsageError, match="65 tokens"):
        launches[1]()
    assert len(starts) == 1
    assert not streams.log
    assert group.calls == 0


def test_what_a_launch_reads_is_kept_until_it_is_made(streams):
    """Nobody else holds a prepared launch's tensors: memory freed before the launch could be another's."""
    layer = MoELayer(CONFIG, world=2)
    group, starts = group_of(layer), []
    own = rank_weights(group, layer, layer_weights(layer))[0]
    x, ids, weight = torch.zeros(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    held = [weakref.ref(one) for one in (x, ids, weight, own.up_XUH, own.down_XHD)]
    group.engines[0].launch(
        x, layer.router.weight, own.up_XUH, own.down_XHD, expert_SK=ids, weight_SK=weight, together=starts
    )
    del x, ids, weight, own
    gc.collect()
    assert all(one() is not None for one in held)
    starts.clear()
    gc.collect()
    assert not any(one() is not None for one in held)


# --- failures ----------------------------------------------------------------------------------------------------


def test_what_all_ranks_waited_for_is_told_together(streams):
    group = group_of(MoELayer(CONFIG, world=3))
    group.raise_if_failed()
    # code, rank, role, wait, index, seen, expected, status: see `signals`
    for rank in (0, 2):
        group.engines[rank].errors.words.copy_(torch.tensor([1, rank, 2, 2, 1, 0, 1, 0]))
    with pytest.raises(
        MegakernelTimeout, match=r"rank 0, planner: .* counts of rank 1.*rank 2, planner.*3 ranks on one"
    ):
        group.check()
    with pytest.raises(MegakernelTimeout):
        group.raise_if_failed()
    group.recover()
    group.check()


def test_wrong_input_is_told_once(streams):
    """Every rank reports it; the next call doesn't hear of it again."""
    group = group_of(MoELayer(CONFIG, world=3))
    for one in group.engines:
        one.errors.words[STATUS] = Status.NONFINITE
    with pytest.raises(MegakernelInputError, match="not finite"):
        group.check()
    assert not any(one.errors.reported for one in group.engines)
    group.check()
