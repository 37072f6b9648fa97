"""What the GPU tests do, as functions that every rank calls: in the test process on one GPU, under torchrun on several.

Each returns a small dict of what it measured and raises AssertionError on what is wrong.

    torchrun --nproc-per-node 2 tests/gpu/scenarios.py matrix timeout ...     prints one JSON line per scenario
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import cases
import harness
import one_gpu
from harness import Case, engine_for, make_inputs, rank_and_size, run_case

from moe_fast import backend, compiler, engine_choice, unfused
from moe_fast.failures import MegakernelInputError, MegakernelTimeout
from moe_fast.kernel import tile_pairs
from moe_fast.weights import ChainWeights


def launcher(case: Case, inputs: harness.Inputs, **more):
    """A function without arguments that enqueues one call of this rank."""
    engine = engine_for(case)
    rank, _ = rank_and_size()
    weights = inputs.chain(inputs.placement.experts_of_rank[rank])
    return lambda: harness.launch(engine, inputs, rank, weights=weights, **more)


def agree(flag: bool) -> bool:
    """True if `flag` holds on every rank."""
    if not dist.is_initialized():
        return flag
    box: list = [None] * dist.get_world_size()
    dist.all_gather_object(box, flag)
    return all(box)


def matrix(first: int = 0, last: int | None = None) -> dict:
    """Every case of the pairwise matrix, workspace poisoned before each."""
    worst: dict[str, float] = {}
    count, failures = 0, []
    for number in range(len(cases.SHAPES))[first:last]:
        for i, case in enumerate(cases.cases_of(number)):
            message = ""
            try:
                errors = run_case(case, seed=number * 100 + i)
                for name, value in errors.items():
                    key = f"{name} {case.dtype}"
                    worst[key] = max(worst.get(key, 0.0), value)
            except (AssertionError, MegakernelTimeout) as error:
                message = f"{case}: {type(error).__name__}: {error}"
                failures.append(message)
                if isinstance(error, MegakernelTimeout):
                    engine_for(case).recover()
            assert agree("Timeout" not in message), message
            count += 1
    assert not failures, f"{len(failures)} of {count} cases: " + " | ".join(failures[:5])
    return {"cases": count, "shapes": len(cases.SHAPES), "worst": {k: float(f"{v:.3g}") for k, v in worst.items()}}


def special() -> dict:
    """The sizes users have: Qwen3's layer, the shipped model's (narrower than a tile), other families'."""
    out = {}
    for case in (*cases.SPECIAL, *cases.FAMILY_SIZES):
        for scheduler in (
            ("spare_warps", "os_block", "tickets") if case in (cases.SMALL, cases.QWEN3) else ("spare_warps",)
        ):
            for routing in ("gate", "zipf"):
                one = replace(case, scheduler=scheduler, routing=routing)
                out[str(one)] = float(f"{run_case(one)['y']:.3g}")
    return out


def many() -> dict:
    """Many tokens: every block pushes its own first rows, for each scheduler, layout and transport."""
    every = [*cases.MANY, *(cases.MANY_PLACED if rank_and_size()[1] > 1 else [])]
    routed = [replace(case, routing=routing) for case in every for routing in ("gate", "zipf")]
    return {str(case): float(f"{run_case(case)['y']:.3g}") for case in routed}


def token_tiles() -> dict:
    """Calls around the number of tokens from which the gate's tiles are twice as high, and with a tile of one token.

    Every buffer, with chosen and given routing; then ids, weights and results of the last call with low tiles, which
    must have the bits that one token more leaves.
    """
    rank, ranks = rank_and_size()
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    out: dict[str, Any] = {}
    for number, case in enumerate([*cases.TOKEN_TILES, *(cases.TOKEN_TILES_SEVERAL if ranks > 1 else [])]):
        low = 64 * (sms - (case.scheduler == "os_block"))
        every = [(low, 65), (low + 1, 63)] + ([(65, low), (63, 64)] if number == 0 else [])
        for turn, tokens in enumerate(every):
            routings = ("gate", "zipf") if number == 0 else ("gate", "zipf")[(number + turn) % 2 :][:1]
            for routing in routings:
                one = replace(case, tokens=tokens, max_tokens=low + 1, routing=routing)
                out[str(one)] = float(f"{run_case(one, seed=number)['y']:.3g}")
        if number in (0, 3):
            one = replace(case, tokens=(low + 1,), max_tokens=low + 1, routing="gate")
            engine, inputs, seen = engine_for(one), make_inputs(one), []
            for tokens in (low + 1, low):
                y = harness.launch(engine, inputs, rank, x=inputs.x[rank][:tokens])
                engine.check()
                left = engine.buffers(tokens)
                seen.append([t[:low].clone() for t in (left.chosen_SK, left.weight_SK, y)])
            same = [torch.equal(a, b) for a, b in zip(*seen, strict=True)]
            assert all(same), f"{one}: other ids, weights, y with low tiles than with high ones: {same}"
            out[f"{one.experts} experts"] = {"bit_identical": True}
    return out


def repeat() -> dict:
    """Two hundred calls back to back with random S and routing, no host synchronisation between them.

    Then each is made again alone; every result must have the same bits. Without and with a shared expert.
    """
    out = {"plain": repeat_case(cases.SMALL), "shared expert": repeat_case(cases.SHARED)}
    if rank_and_size()[1] > 1:
        out["replicas"] = repeat_case(replace(cases.SMALL, replicas="mixed"))
    return out


def repeat_case(case: Case) -> dict:
    rank, ranks = rank_and_size()
    case = replace(case, routing="gate")
    engine = engine_for(case)
    inputs = make_inputs(replace(case, tokens=(4096,)), seed=5)
    weights = inputs.chain(inputs.placement.experts_of_rank[rank])
    generator = torch.Generator().manual_seed(11)
    kinds = ("uniform", "zipf", "one_expert", "one_rank", "masked", "duplicates")
    device = inputs.x[rank].device
    plans = []
    for call in range(200):
        tokens = [int(torch.randint(0, 1200, (1,), generator=generator)) for _ in range(ranks)]
        if call % 17 == 3:
            tokens[call % ranks] = 0
        start = int(torch.randint(0, 2000, (1,), generator=generator))
        kind = kinds[call % len(kinds)] if call % 3 else "gate"
        ids = weight = None
        if kind != "gate":
            g = torch.Generator(device=device).manual_seed(call * 8 + rank)
            ids = harness.make_ids(replace(case, routing=kind), tokens[rank], rank, g, device)
            weight = torch.rand(tokens[rank], case.top_k, device=device, generator=g)
        plans.append((inputs.x[rank][start : start + tokens[rank]], ids, weight))

    def call(plan):
        return harness.launch(engine, inputs, rank, plan[0], weights, expert_SK=plan[1], weight_SK=plan[2])

    engine.poison()
    together = [call(plan) for plan in plans]
    engine.check()
    different = []
    for number, plan in enumerate(plans):
        if number % 5 == 0:
            engine.poison()
        alone = call(plan)
        engine.check()
        if not torch.equal(alone, together[number]):
            different.append(number)
        assert bool(torch.isfinite(alone).all()), f"call {number} isn't finite"
    assert not different, f"calls {different[:10]} have other bits back to back than alone"
    return {"calls": len(plans), "bit_identical": True}


def solving() -> dict:
    """The solver on the device against `moe_ref.balance`: over 1,000 batches, same quotas; how long a solve takes."""
    from solving import measure

    if rank_and_size()[0]:
        return {}
    rows = measure()
    times = {
        f"E{row['experts']} P{row['ranks']} {row['loads']}": [row["median_us"], row["worst_us"], row["first_median_us"]]
        for row in rows
    }
    return {"plans": sum(row["plans"] for row in rows), "microseconds_median_worst_and_first_median": times}


def sweep(shapes: list[Case]) -> dict:
    """Every S and routing for each of these cases; what was worst."""
    worst: dict[str, float] = {}
    failures, count = [], 0
    for number, shape in enumerate(shapes):
        for i, tokens in enumerate(cases.TOKENS):
            routing = harness.ROUTINGS[(i + number) % len(harness.ROUTINGS)]
            one = replace(shape, tokens=(tokens, cases.TOKENS[(i + 3) % len(cases.TOKENS)]), routing=routing)
            message = ""
            try:
                errors = run_case(one, seed=i)
                worst = {n: max(worst.get(n, 0.0), v) for n, v in errors.items()}
            except (AssertionError, MegakernelTimeout, MegakernelInputError) as error:
                message = f"{one}: {type(error).__name__}: {error}"
                failures.append(message)
                if isinstance(error, MegakernelTimeout):
                    engine_for(one).recover()
            assert agree("Timeout" not in message), message
            count += 1
    assert not failures, f"{len(failures)} of {count} cases: " + " | ".join(failures[:5])
    return {"cases": count, "worst": {k: float(f"{v:.3g}") for k, v in worst.items()}}


def placed() -> dict:
    """Experts on several ranks: plans solved in the kernel and handed in, every S and routing, one GPU operation."""
    from moe_ref import balance

    rank, ranks = rank_and_size()
    if ranks == 1:
        raise RuntimeError("several ranks are needed: on one an expert has one place")
    found = sweep(cases.PLACED)
    # a plan that is handed in: the linear program's, and one that doesn't add up
    one = replace(cases.SMALL, replicas="two", tokens=(700, 300), routing="zipf")
    engine, inputs = engine_for(one), make_inputs(one)
    plan = balance.schedule(plan_of(one, inputs).counts_PE, one.placement(ranks), method="lp")
    quota = torch.from_numpy(plan.quota_PED).to(inputs.x[rank].device, torch.int32)
    solved = launcher(one, inputs)()
    engine.check()
    given = launcher(one, inputs, quota_PED=quota)()
    engine.check()
    seen = engine.buffers(inputs.x[rank].shape[0]).row_tiles
    tiles = int((-(-plan.quota_by_slot().sum(axis=0)[rank] // 128)).sum())
    assert seen == tiles, f"{seen} row tiles under the plan that was handed in, it has {tiles}"
    assert torch.equal(given, solved), "the result depends on who computed a row"
    wrong = quota.clone()
    wrong[0, 3, 0] += 1
    launcher(one, inputs, quota_PED=wrong)()
    message = ""
    try:
        engine.check()
    except MegakernelInputError as error:
        message = str(error)
    assert "add up" in message, f"a plan that doesn't add up was taken: {message!r}"
    again = launcher(one, inputs)()
    engine.check()
    assert torch.equal(again, solved), "the call after a wrong plan differs"
    call = launcher(one, inputs, out=again)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == 1, f"{len(names)} GPU operations: {names[:5]}"
    return {**found, "gpu_operations": len(names)}


def layouts() -> dict:
    """The fixed layout and capacities: every S and routing; rows beyond a slot's capacity are refused, not lost."""
    _, ranks = rank_and_size()
    out = sweep(cases.LAYOUTS_ALONE)
    # without a capacity factor a slot holds max_tokens rows of a source; an expert in both choices of a token is two
    one = replace(cases.SMALL, layout="fixed", max_tokens=256, tokens=(256,), routing="uniform")
    engine, inputs = engine_for(one), make_inputs(one)
    good = launcher(one, inputs)()
    engine.check()
    wrong = make_inputs(one)
    wrong.expert[ranks - 1].zero_()
    launcher(one, wrong)()
    message = ""
    try:
        engine.check()
    except MegakernelInputError as error:
        message = str(error)
    assert "more rows" in message, f"512 rows went into 256 slots: {message!r}"
    again = launcher(one, inputs)()
    engine.check()
    assert torch.equal(again, good), "the call after an overflow differs"
    out["layers"] = compare_layers([{"placement": some_replicas(), **changes} for changes in cases.PLACED_LAYERS])
    out["gradients"] = gradients_of({"capacity_factor": 0.7})
    return {**out, "refused": message}


def transports() -> dict:
    """Put-with-signal forced: no peer's address is known, every remote row is counted on it, same bits as stores."""
    rank, ranks = rank_and_size()
    if ranks == 1:
        raise RuntimeError("several ranks are needed: one has no peer to put to")
    out = sweep(cases.PUTS)
    for case in cases.PUTS:
        one = replace(case, tokens=(700, 1000), routing="zipf")
        # both stay open while they are compared
        harness.close_engines()
        puts, stores = engine_for(one), engine_for(replace(one, transport="stores"))
        assert puts.heap.peers.count_nonzero() == 1, "a peer's address is known"
        inputs = make_inputs(one)
        before = puts.readback.put_rows
        y = launcher(one, inputs)()
        puts.check()
        rows, results = (now - then for now, then in zip(puts.readback.put_rows, before, strict=True))
        other = launcher(replace(one, transport="stores"), inputs)()
        stores.check()
        assert torch.equal(y, other), f"{one}: other bits than direct stores"
        assert stores.readback.put_rows == (0, 0), "a store counted as a put"
        plan = plan_of(one, inputs)
        sent = plan.quota_by_slot().sum(axis=2)
        remote, returned = int(sent[rank].sum() - sent[rank, rank]), int(sent[:, rank].sum() - sent[rank, rank])
        assert (rows, results) == (remote, returned), f"{rows}, {results} puts; {remote} rows, {returned} results"
        out[f"{one.experts} experts{' replicas' if one.replicas != 'none' else ''} {one.layout}"] = [rows, results]
    out["repeat"] = repeat_case(cases.PUTS[0])
    return out


def wire() -> dict:
    """A token once to each rank, partial sums back: every S and routing, many calls, graph replay, one operation."""
    rank, ranks = rank_and_size()
    if ranks == 1:
        raise RuntimeError("several ranks are needed: on one nothing crosses")
    out = sweep(cases.WIRE)
    one = replace(cases.WIRE[0], tokens=(1000, 700))
    out["carried"] = float(f"{run_case(cases.CARRIED_TOKENS)['y']:.3g}")
    out["repeat"] = repeat_case(cases.WIRE[3])
    out["graph"] = replayed(replace(cases.WIRE[4], tokens=(700, 300)))
    engine, inputs = engine_for(one), make_inputs(one)
    call = launcher(one, inputs)
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == 1, f"{len(names)} GPU operations: {names[:5]}"
    engine.check()
    seen = engine.buffers(inputs.x[rank].shape[0])
    sent = int(seen.sent_PG[rank].sum() - seen.sent_PG[rank, rank])
    low, high = engine.shape.first_expert(rank), engine.shape.first_expert(rank + 1)
    routes = int(seen.counts_PE[rank].sum() - seen.counts_PE[rank, low:high].sum())
    out |= {"gpu_operations": len(names), "rows": {"tokens": sent, "routes": routes}}
    out["layers"] = compare_layers([cases.WIRE_LAYER])
    out["gradients"] = gradients_of(cases.WIRE_LAYER)
    return out


def plan_of(case: Case, inputs: harness.Inputs):
    """The plan of a case whose routing is handed in."""
    from moe_ref import balance

    _, ranks = rank_and_size()
    c, placement = case.config, case.placement(ranks)
    ids = [harness.within_capacity(one, c.capacity(len(one))) for one in inputs.expert]
    counts = torch.stack([torch.bincount(i[i >= 0].flatten(), minlength=c.experts) for i in ids]).cpu().numpy()
    return balance.schedule(counts, placement, method="flow" if placement.max_replicas > 1 else "plain")


def graph() -> dict:
    """Capture a call in a CUDA graph, replay it a hundred times with changing inputs, on a stream of the caller's."""
    return replayed(replace(cases.SMALL, tokens=(700, 300)))


def replayed(case: Case) -> dict:
    """See `graph`."""
    engine = engine_for(case)
    rank, _ = rank_and_size()
    sets = [make_inputs(case, seed) for seed in range(4)]
    wanted = []
    for one in sets:
        wanted.append(launcher(case, one)())
        engine.check()
    held = make_inputs(case, 0)
    out = torch.empty_like(held.x[rank])
    call = launcher(case, held, out=out)
    stream = torch.cuda.Stream()
    recorded = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream), torch.cuda.graph(recorded, stream=stream):
        call()
    kinds = node_kinds(recorded)
    assert kinds == {"kernel": 1}, f"the graph holds {kinds}, expected one kernel"
    recorded.instantiate()
    wrong = 0
    for number in range(100):
        chosen = number * 7 % 4
        held.x[rank].copy_(sets[chosen].x[rank])
        held.router.copy_(sets[chosen].router)
        held.first.copy_(sets[chosen].first)
        held.second.copy_(sets[chosen].second)
        out.fill_(float("nan"))
        recorded.replay()
        torch.cuda.synchronize()
        wrong += not torch.equal(out, wanted[chosen])
    engine.check()
    assert wrong == 0, f"{wrong} of 100 replays differ"
    # the caller's stream: work enqueued before it on that stream is seen, the default stream isn't waited for
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        held.x[rank].copy_(sets[1].x[rank])
        held.router.copy_(sets[1].router)
        held.first.copy_(sets[1].first)
        held.second.copy_(sets[1].second)
        y = call()
    stream.synchronize()
    assert torch.equal(y, wanted[1]), "the call did not respect the caller's stream"
    return {"replays": 100, "graph_nodes": kinds}


def node_kinds(recorded: torch.cuda.CUDAGraph) -> dict[str, int]:
    """Nodes of a captured graph by kind."""
    import cuda.bindings.runtime as runtime

    handle = runtime.cudaGraph_t(recorded.raw_cuda_graph())
    _, _, count = runtime.cudaGraphGetNodes(handle)
    _, nodes, _ = runtime.cudaGraphGetNodes(handle, count)
    kinds: dict[str, int] = {}
    for node in nodes[:count]:
        _, kind = runtime.cudaGraphNodeGetType(node)
        name = kind.name.replace("cudaGraphNodeType", "").lower()
        kinds[name] = kinds.get(name, 0) + 1
    return kinds


def operations() -> dict:
    """GPU operations of one forward, counted by the profiler, gate included, K = 8; beside it the eager chain's.

    Also through MoELayer, for layers with biases, a shared expert, a router of fp32.
    """
    case = replace(cases.QWEN3, tokens=(1000,))
    engine, inputs = engine_for(case), make_inputs(case)
    rank, ranks = rank_and_size()
    low, high = engine.shape.first_expert(rank), engine.shape.first_expert(rank + 1)
    weights = ChainWeights(inputs.router, inputs.first[low:high], inputs.second[low:high])
    fused = launcher(case, inputs, out=torch.empty_like(inputs.x[rank]))

    def chain() -> None:
        with torch.no_grad():
            unfused.forward(inputs.x[rank], weights, case.config, None, ranks)

    def through(one) -> Callable[[], Any]:
        x = torch.randn(300, one.config.hidden, device="cuda").to(one.config.torch_dtype)

        def call() -> None:
            with torch.no_grad():
                one(x)

        return call

    calls = {"fused": fused, "unfused": chain}
    for number, changes in enumerate(cases.LAYERS):
        calls[f"fused layer {number}"] = through(make_layer("fused", **changes))
    routed = make_layer("fused", **cases.LAYERS[4])
    routed.router.weight = torch.nn.Parameter(routed.router.weight.detach().float())
    calls["fused layer, router of fp32"] = through(routed)
    names = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        kind = torch.autograd.DeviceType.CUDA
        names[name] = [event.name for event in profile.events() if event.device_type == kind]
    engine.check()
    for name, found in names.items():
        assert len(found) == 1 or name == "unfused", f"{name}: {len(found)} GPU operations: {found[:5]}"
    assert len(names["unfused"]) > 10, names["unfused"]
    many = len(names["unfused"])
    return {"gpu_operations": len(names["fused"]), "unfused_operations": many, "layers": len(names) - 2}


def timeout() -> dict:
    """A rank that never launches makes the others end with an error that names rank, role and wait, in time.

    On one GPU: a plan that expects rows which never come (the arrival targets are tampered with).
    """
    return timeout_of(replace(cases.SMALL, tokens=(200, 300)))


def timeout_of(case: Case) -> dict:
    """See `timeout`."""
    rank, ranks = rank_and_size()
    engine = engine_for(case)
    before = launcher(case, make_inputs(case))()
    engine.check()
    call = launcher(case, make_inputs(case))
    usual, engine.deadline_s = engine.deadline_s, 0.3
    message, took = "", 0.0
    if ranks == 1:
        engine.memory.local("arrived_target").add_(5)
    if ranks == 1 or rank != 1:
        start = time.perf_counter()
        call()
        try:
            engine.check()
        except MegakernelTimeout as error:
            message = str(error)
        took = time.perf_counter() - start
        assert message, "no MegakernelTimeout"
        assert took < 10 * engine.deadline_s, f"it took {took:.1f} s"
        assert f"rank {rank}" in message, message
        wanted = "rows of tile" if ranks == 1 else "counts of rank 1"
        assert wanted in message or "arrivals" in message, message
        try:
            call()
            raise RuntimeError("a call after a timeout went through")
        except MegakernelTimeout:
            pass
    engine.deadline_s = usual
    engine.recover()
    again = launcher(case, make_inputs(case))()
    engine.check()
    assert torch.equal(again, before), "after recovery the result differs"
    return {"message": message, "seconds": round(took, 3)}


def checked(case: Case, inputs: harness.Inputs) -> torch.Tensor:
    """A call's result, after what the kernel reported was looked at."""
    y = launcher(case, inputs)()
    engine_for(case).check()
    return y


def pairs() -> dict:
    """Processors of two blocks: right results for every S, the same bits in any company and as one block each, and an
    end in time when rows don't come."""
    out: dict[str, Any] = sweep(cases.SWEPT_PAIRS)
    for case in cases.PAIRS:
        for routing in ("gate", "zipf", "one_expert", "masked"):
            one = replace(case, routing=routing)
            out[str(one)] = float(f"{run_case(one)['y']:.3g}")
    plain = replace(cases.SMALL, tokens=(700, 300), paired=False)
    inputs, paired = make_inputs(plain), replace(plain, paired=True)
    assert torch.equal(*(checked(case, inputs) for case in (plain, paired))), "pairs of blocks make other bits"
    return out | {"repeat": repeat_case(paired), "graph": replayed(paired), "timeout": timeout_of(paired)}


def wrong_input() -> dict:
    """NaN in one rank's tokens, and an expert id out of range on one rank, raise on every rank; later calls work."""
    rank, ranks = rank_and_size()
    case = replace(cases.SMALL, tokens=(200, 300))
    engine = engine_for(case)
    good = launcher(case, make_inputs(case))()
    engine.check()
    messages = []
    for kind in ("nan", "id"):
        inputs = make_inputs(replace(case, routing="gate" if kind == "nan" else "uniform"))
        if rank == ranks - 1:
            if kind == "nan":
                inputs.x[rank][17, 3] = float("nan")
            else:
                inputs.expert[rank][5, 1] = 10**9
        launcher(case, inputs)()
        try:
            engine.check()
            raise AssertionError(f"{kind}: nothing was raised")
        except MegakernelInputError as error:
            messages.append(str(error))
        after = launcher(case, make_inputs(case))()
        engine.check()
        assert torch.equal(after, good), f"the call after {kind} differs"
    if ranks > 1:
        messages.append(overflow())
    assert "not finite" in messages[0], messages
    assert "outside [-1, E)" in messages[1], messages
    return {"messages": messages}


def overflow() -> str:
    """All eight choices of every token are the same expert: more rows than a rank's buffer holds; refused on all."""
    rank, _ = rank_and_size()
    engine = engine_for(cases.FULL)
    inputs = make_inputs(cases.FULL)
    good = launcher(cases.FULL, make_inputs(replace(cases.FULL, tokens=(8,))))()
    engine.check()
    inputs.expert[rank].zero_()
    launcher(cases.FULL, inputs)()
    message = ""
    try:
        engine.check()
    except MegakernelInputError as error:
        message = str(error)
    assert "more rows" in message, f"an overflow went unnoticed: {message!r}"
    again = launcher(cases.FULL, make_inputs(replace(cases.FULL, tokens=(8,))))()
    engine.check()
    assert torch.equal(again, good), "the call after an overflow differs"
    return message


def traced() -> dict:
    """Device counters of rows sent equal the remote routed rows; the timeline covers every task."""
    from moe_fast.timeline import read_timeline

    rank, ranks = rank_and_size()
    case = replace(cases.QWEN3, tokens=(1000, 700))
    from moe_fast.heap import local_heap, symmetric_heap
    from moe_fast.kernel.regions import heap_regions
    from moe_fast.kernel.shapes import KernelShape

    shape = KernelShape.from_config(case.config, ranks, case.scheduler, trace=True)
    size, device = heap_regions(shape, case.max_tokens)[1], torch.device("cuda", torch.cuda.current_device())
    heap = symmetric_heap(size, device) if ranks > 1 else local_heap(size, device)
    engine = harness.Engine(shape, heap, case.max_tokens)
    heap.barrier()
    inputs = make_inputs(case)
    low, high = shape.first_expert(rank), shape.first_expert(rank + 1)
    y = engine.launch(inputs.x[rank], inputs.router, inputs.first[low:high], inputs.second[low:high])
    engine.check()
    seen = engine.buffers(inputs.x[rank].shape[0])
    counts = seen.counts_PE.cpu()
    remote = int(counts[rank].sum() - counts[rank, low:high].sum())
    sent = engine.readback.sent_rows
    assert sent == remote, f"{sent} rows sent to peers, {remote} routed to them"
    line = read_timeline(engine)
    tasks = seen.dealt_tiles * (shape.columns0 + shape.columns1)
    assert line.tasks == tasks, f"{line.tasks} tasks traced, {tasks} planned"
    plain = launcher(case, inputs)()
    assert torch.equal(plain, y), "tracing changes bits"
    out = {"remote_rows": remote, "bytes": remote * case.hidden * 2, "tasks": tasks, "busy": line.utilisation}
    heap.close()
    return out


def make_layer(backend: str, placement=None, **changes):
    """A MoELayer on this process' GPU, on all ranks of the group."""
    from moe_ref import MoEConfig, MoELayer
    from moe_ref.world import DistributedWorld, SimulatedWorld

    world = DistributedWorld() if dist.is_initialized() else SimulatedWorld(1)
    config = MoEConfig(**{**cases.LAYER, **changes})
    device = torch.device("cuda", torch.cuda.current_device())
    return MoELayer(config, backend=backend, world=world, placement=placement, device=device)


def some_replicas():
    """A placement of 8 experts with one and two replicas; None on one rank."""
    _, ranks = rank_and_size()
    return replace(cases.SMALL, replicas="mixed").placement(ranks) if ranks > 1 else None


def layer() -> dict:
    """The backend behind a MoELayer: the differential harness against the reference and the unfused chain."""
    return compare_layers([*cases.LAYERS, {"placement": some_replicas()}])


def compare_layers(every: list[dict]) -> dict:
    """See `layer`."""
    from moe_ref.diff import compare

    rank, _ = rank_and_size()
    out = {}
    for number, changes in enumerate(every):
        one = make_layer("fused", **changes)
        g = torch.Generator(device="cuda").manual_seed(rank)
        x = torch.randn(300 + 50 * rank, one.config.hidden, device="cuda", generator=g).to(one.config.torch_dtype)
        # the chain knows no capacity and one wire format
        alone = one.config.capacity_factor or one.config.wire_format != "routes"
        for other in ("ref",) if alone else ("ref", "unfused"):
            report = compare("fused", other, one, [x])
            # The chain rounds the first product before the activation, the reference and the kernel after it: element
            # by element it differs by more than they do.
            assert report.ok or (other == "unfused" and max(b.relative_error for b in report.buffers) < 1e-2), str(
                report
            )
            out[f"{number} {one.config.hidden} {one.config.dtype} {other}"] = [
                f"{b.buffer} {b.relative_error:.1e}{' same bits' if b.bit_equal else ''}" for b in report.buffers
            ]
        _, stats = one(x, return_stats=True)
        assert int(stats.tokens_per_rank[rank]) == x.shape[0]
        if one.config.capacity_factor:
            one.backend = "ref"
            _, wanted = one(x, return_stats=True)
            assert stats.dropped == wanted.dropped > 0, f"{stats.dropped} dropped, the reference {wanted.dropped}"
    return out


def training() -> dict:
    """Gradients through backend="fused" against float64, and against what the reference's own bf16 backward gets."""
    out = {str(changes): gradients_of(changes) for changes in (cases.LAYERS[0], *cases.LAYERS[3:5])}
    if rank_and_size()[1] > 1:
        out["replicas"] = gradients_of({"placement": some_replicas()})
        out["wrapper"] = replicated_training()
    return out


def replicated_training() -> dict:
    """Three steps under the training wrapper with experts on all ranks: replicas keep the same bits, the loss falls."""
    from moe_ref import MoEConfig, MoELayer
    from moe_ref.train.replicated import Replicated
    from moe_ref.world import DistributedWorld

    rank, ranks = rank_and_size()
    device = torch.device("cuda", torch.cuda.current_device())
    config = MoEConfig(512, 256, 8, 2, dtype="bfloat16", max_tokens=4096)
    one = MoELayer(config, backend="fused", device=device)
    model = Replicated(one, replace(cases.SMALL, replicas="two").placement(ranks), DistributedWorld())
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    g = torch.Generator(device="cuda").manual_seed(rank)
    x = torch.randn(300, 512, device="cuda", generator=g).to(torch.bfloat16)
    want = torch.randn(300, 512, device="cuda", generator=g).to(torch.bfloat16)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x).float() - want.float()).square().mean()
        loss.backward()
        model.synchronize()
        optimizer.step()
        losses.append(round(float(loss), 4))
    assert losses[-1] < losses[0], losses
    mine = [p.detach().view(torch.int16).cpu() for p in (one.up_parameter, one.down_proj)]
    box: list = [None] * ranks
    dist.all_gather_object(box, mine)
    assert all(torch.equal(a, b) for other in box for a, b in zip(other, box[0], strict=True)), "replicas drifted"
    return {"losses": losses}


def gradients_of(changes: dict) -> dict:
    """Relative error of every parameter's gradient, the kernel's and the reference's own."""
    rank, _ = rank_and_size()
    fused = make_layer("fused", **changes)
    g = torch.Generator(device="cuda").manual_seed(rank)
    x = torch.randn(200, fused.config.hidden, device="cuda", generator=g).to(fused.config.torch_dtype)
    upstream = torch.randn(200, fused.config.hidden, device="cuda", generator=g).to(fused.config.torch_dtype)
    gradients = {}
    for name, dtype in (("fused", "bfloat16"), ("ref", "bfloat16"), ("exact", "float64")):
        one = make_layer("fused" if name == "fused" else "ref", **{**changes, "dtype": dtype})
        with torch.no_grad():
            for target, source in zip(one.parameters(), fused.parameters(), strict=True):
                target.copy_(source)
        inputs = x.detach().clone().to(one.config.torch_dtype).requires_grad_(True)
        one(inputs).backward(upstream.to(one.config.torch_dtype))
        gradients[name] = {"x": inputs.grad} | {n: p.grad for n, p in one.named_parameters()}
    out = {}
    for name, exact in gradients["exact"].items():
        mine, reference = (harness.relative(gradients[b][name], exact) for b in ("fused", "ref"))
        out[name] = [float(f"{mine:.3g}"), float(f"{reference:.3g}")]
        assert mine <= 1.5 * reference + 2e-3, f"gradient of {name}: {mine:.2e}, the reference's own {reference:.2e}"
    return out


def refused() -> dict:
    """What can't run is refused on the host, by name, before anything is launched."""
    from moe_ref.errors import UsageError

    messages = []
    case = replace(cases.SMALL, tokens=(100,))
    engine = engine_for(case)
    inputs = make_inputs(replace(case, tokens=(4097,)))
    rank, _ = rank_and_size()
    low, high = engine.shape.first_expert(rank), engine.shape.first_expert(rank + 1)
    for attempt, wanted in (
        (lambda: engine.launch(inputs.x[rank], inputs.router, inputs.first[low:high], inputs.second[low:high]), "4097"),
        (lambda: harness.Engine(engine.shape, engine.heap, 100_000), "symmetric heap has"),
        (
            lambda: make_layer("fused", hidden=100)(torch.zeros(3, 100, device="cuda", dtype=torch.bfloat16)),
            "hidden=100",
        ),
        (
            lambda: make_layer("fused", experts=300)(torch.zeros(3, 512, device="cuda", dtype=torch.bfloat16)),
            "experts=300",
        ),
    ):
        messages.append(harness.refusal(attempt, wanted))
    if dist.is_initialized():
        try:
            make_layer("fused", top_k=2 + rank % 2)
        except UsageError as error:
            messages.append(str(error))
        else:
            raise AssertionError("ranks with different configs were accepted")
    return {"messages": messages}


def uneven() -> dict:
    """Numbers of experts that the ranks don't divide: the first E mod P ranks hold one more."""
    out = {}
    for case in cases.uneven(rank_and_size()[1]):
        for number, routing in enumerate(harness.ROUTINGS):
            one = replace(case, routing=routing)
            out[str(one)] = float(f"{run_case(one, seed=number)['y']:.3g}")
    return out


def dealt_numbers(rows: list[int]) -> int:
    """How many row tiles a kernel that carries rows deals where the experts of this rank have so many rows."""
    return tile_pairs.dealt_tiles(sum(tile_pairs.count_pairs(n, True) for n in rows))


def carried() -> dict:
    """Experts whose last row tile goes along with the one before it: every buffer, as many dealt tiles as there should
    be, the same bits by pairs of blocks as by single ones, and on one rank the same as when the carried rows are all
    that an expert gets."""
    out: dict[str, Any] = {}
    rank, ranks = rank_and_size()
    for case in cases.CARRIED:
        inputs = make_inputs(case)
        assert inputs.expert is not None
        single = replace(case, paired=False)
        assert torch.equal(*(checked(o, inputs) for o in (single, case))), f"{case}: pairs of blocks make other bits"
        out[str(case)] = float(f"{run_case(case)['y']:.3g}")
        engine = engine_for(case)
        seen = engine.buffers(len(inputs.x[rank]))
        experts = inputs.placement.experts_of_rank[rank]
        rows = [int(n) for n in seen.counts_PE.sum(0)[list(experts)].tolist()]
        assert any(tile_pairs.carried_rows(int(n), True) for n in seen.counts_PE.sum(0)), "nothing is carried"
        expected = dealt_numbers(rows)
        assert seen.dealt_tiles == expected, f"{seen.dealt_tiles} of {seen.row_tiles} dealt, expected {expected}"
        if ranks > 1:
            continue
        ids = inputs.expert[rank].flatten()
        kept = torch.zeros_like(ids, dtype=torch.bool)
        for expert, count in zip(experts, rows, strict=True):
            if tile_pairs.carried_rows(count, True):
                kept[(ids == expert).nonzero().flatten()[-(count % 128) :]] = True
        before = seen.returned_NH[kept].clone()
        harness.launch(engine, inputs, rank, expert_SK=ids.masked_fill(~kept, -1).view_as(inputs.expert[rank]))
        engine.check()
        alone = engine.buffers(len(inputs.x[rank]))
        few = [tile_pairs.carried_rows(n, True) for n in rows]
        found, expected = (alone.row_tiles, alone.dealt_tiles), (sum(n > 0 for n in few), dealt_numbers(few))
        assert found == expected, f"row tiles and how many are dealt: {found}, expected {expected}"
        assert torch.equal(alone.returned_NH[kept], before), f"{case}: bits depend on the tile that carries a row"
    tickets = next(case for case in cases.CARRIED if case.scheduler == "tickets")
    return out | {"repeat": repeat_case(tickets)}


def large() -> dict:
    """Buffers of more than 2^31 elements: every dispatched row, and samples of what is computed from it.

    The shape of offsets is what is tested, so one rank is enough; both staging sides are used.
    """
    case, c = cases.LARGE, cases.LARGE.config
    engine = engine_for(case, deadline_s=20.0)
    inputs = make_inputs(case)
    x, tokens, worst = inputs.x[0], case.tokens[0], {}
    sample = torch.cat([torch.arange(0, tokens, 509, device=x.device), torch.arange(tokens - 130, tokens).to(x.device)])
    for _ in range(2):
        engine.poison()
        y = engine.launch(x, inputs.router, inputs.first, inputs.second)
        engine.check()
        got = engine.buffers(tokens)
        elements = {"rows": got.rows_RH.numel(), "hidden": got.hidden_RD.numel(), "returned": got.returned_NH.numel()}
        assert min(elements.values()) > 1 << 31, elements
        ids, first_row = got.expert_SK.long(), 0
        hidden = {"hidden": [], "want": []}
        for e in range(c.experts):
            token = (ids == e).any(1).nonzero(as_tuple=True)[0]
            where = torch.arange(first_row, first_row + len(token), device=x.device)
            assert torch.equal(engine.readback.dispatched(got.rows_RH, where, x), x[token]), f"rows of expert {e}"
            # the last rows of the expert, and some of every part of the buffer
            at = torch.cat([torch.arange(0, len(token), 997), torch.arange(len(token) - 100, len(token))]).to(x.device)
            hidden["hidden"].append(got.hidden_RD[first_row + at])
            hidden["want"].append(harness.ffn_hidden(c, x[token[at]], inputs.first[e]))
            first_row += -(-len(token) // 128) * 128
        assert first_row == 128 * got.row_tiles, f"{got.row_tiles} row tiles, expected {first_row // 128}"
        exact = torch.zeros(len(sample), c.top_k, c.hidden, device=x.device, dtype=torch.float64)
        for e in range(c.experts):
            at, k = (ids[sample] == e).nonzero(as_tuple=True)
            exact[at, k] = harness.ffn_exact(c, x[sample[at]], inputs.first[e], inputs.second[e])
        returned = got.returned_NH.view(tokens, c.top_k, c.hidden)[sample]
        want = (got.weight_SK[sample].double().unsqueeze(-1) * exact).sum(1)
        for name, value, expected in (
            ("hidden", torch.cat(hidden["hidden"]), torch.cat(hidden["want"])),
            ("returned", returned, exact),
            ("y", y[sample], want),
        ):
            worst[name] = max(worst.get(name, 0.0), harness.relative(value, expected))
        assert max(worst.values()) <= harness.TOLERANCE[c.torch_dtype], worst
        assert bool(torch.isfinite(y).all()), "a result isn't finite"
    return {"elements": elements, "bytes": engine.heap.size, "worst": {k: float(f"{v:.3g}") for k, v in worst.items()}}


def replicas() -> dict:
    """Training with replicas over this group: as in one process, the same bits on all replicas, resumed elsewhere.

    Gradient sums, re-placement and checkpoints go through NCCL; one process with simulated ranks is the reference.
    """
    from moe_ref.train.job import TrainJob, train
    from moe_ref.world import DistributedWorld, SimulatedWorld

    world = DistributedWorld()
    # every rank has a sequence in every micro-batch, and two experts, so that one of them can move
    usual = TrainJob(
        steps=16, sequences=6 if world.num_ranks <= 2 else 2 * world.num_ranks, context=48, hidden=32, intermediate=16,
        experts=max(8, 2 * world.num_ranks), interval=4, always=True, every=8, text="excerpt",
    )  # fmt: skip
    box = [tempfile.mkdtemp() if world.rank == 0 else ""]
    dist.broadcast_object_list(box, 0)
    out: dict = {"backend": dist.get_backend()}
    for name, changes in (
        ("two replicas of every expert", {"replicas": world.num_ranks}),
        ("optimiser states divided", {"replicas": world.num_ranks, "sharded": True, "micro_batches": 2}),
        ("experts that move", {"replicas": 1}),
    ):
        task, folder = replace(usual, **changes), Path(box[0]) / name
        alone, _ = train(task, SimulatedWorld(world.num_ranks), world.device)
        whole, _ = train(replace(task, folder=str(folder / "whole")), world, world.device)
        if world.rank == 0:
            checkpoint = next((folder / "whole").glob("step-00000008-*"))
            for copy in ("stopped", *map(str, range(world.num_ranks))):
                shutil.copytree(checkpoint, folder / copy / checkpoint.name)
                (folder / copy / "latest.json").write_text(json.dumps({"folder": checkpoint.name, "step": 8}))
        dist.barrier()
        resumed, training = train(replace(task, folder=str(folder / "stopped"), resume=True), world, world.device)
        one = replace(task, folder=str(folder / str(world.rank)), resume=True, replicas=1, balancing="plain")
        elsewhere, _ = train(one, SimulatedWorld(1), world.device)

        def apart(a: list[float], b: list[float]) -> float:
            return float(f"{max(abs(x - y) for x, y in zip(a, b, strict=True)):.2g}")

        differences = {
            "from_one_process": apart(whole.losses, alone.losses),
            "resumed": apart(resumed.losses, whole.losses[8:]),
            "resumed_in_one_process": apart(elsewhere.losses, whole.losses[8:]),
        }
        assert max(differences.values()) <= 1e-4, f"{name}: losses differ by {differences}"
        assert whole.losses[-1] < 0.9 * whole.losses[0], whole.losses
        assert (whole.moves > 0) == (changes["replicas"] == 1), f"{name}: {whole.moves} experts moved"
        digests = {
            piece.key: hashlib.sha256(piece.data.cpu().numpy().tobytes()).hexdigest()
            for bucket in training.buckets
            for piece in bucket.pieces
        }
        everyone: list = [None] * world.num_ranks
        dist.all_gather_object(everyone, digests)
        shared = set.intersection(*(set(d) for d in everyone))
        assert all(len({d[key] for d in everyone}) == 1 for key in shared), "replicas differ"
        out[name] = {
            "losses": [round(whole.losses[0], 4), round(whole.losses[-1], 4)],
            "differences": differences,
            "moves": whole.moves,
            "tensors_with_equal_bits_on_all_replicas": len(shared),
            "sync_ms_per_step": round(1e3 * whole.sync_seconds / len(whole.losses), 3),
        }
    return out


def slow_start() -> dict:
    """A rank whose kernel takes longer to load than the others' patience: nobody waits before all are ready."""
    rank, ranks = rank_and_size()
    patience, delay = 0.5, 2.0
    load, before = compiler.load, os.environ.get("MOE_REF_DEADLINE_S")

    def slowly(shape):
        time.sleep(delay if rank == ranks - 1 else 0.0)
        return load(shape)

    os.environ["MOE_REF_DEADLINE_S"], compiler.load = str(patience), slowly
    try:
        # buffers of their own, so that this layer needs an engine of its own
        one = make_layer("fused", max_tokens=2048)
        start = time.perf_counter()
        one(torch.ones(64, one.config.hidden, device="cuda", dtype=one.config.torch_dtype))
        took = time.perf_counter() - start
        engine_choice.check_errors()
    finally:
        compiler.load = load
        os.environ.pop("MOE_REF_DEADLINE_S")
        if before is not None:
            os.environ["MOE_REF_DEADLINE_S"] = before
    assert took >= delay, f"the first call took {took:.2f} s, a rank was {delay} s late"
    return {"patience_s": patience, "late_by_s": delay, "first_call_s": round(took, 2)}


def train_fused() -> dict:
    """The training loop with its MoE layers in the megakernel, beside the same loop on the reference."""
    from moe_ref.train.job import TrainJob, train
    from moe_ref.world import DistributedWorld, SimulatedWorld

    world = DistributedWorld() if dist.is_initialized() else SimulatedWorld(1)
    device, out = torch.device("cuda", torch.cuda.current_device()), {}
    for dtype in ("bfloat16", "float16"):
        task = TrainJob(steps=30, replicas=1, balancing="plain", interval=0, balance=0.0, z=0.0, dtype=dtype)
        curves = {}
        for name in ("ref", "fused"):
            outcome, _ = train(replace(task, backend=name), world, device)
            curves[name] = outcome.losses
        difference = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
        assert curves["fused"][-1] < 0.7 * curves["fused"][0], curves["fused"]
        assert difference < 0.1, f"{dtype}: losses differ by {difference} bits per byte from the reference's"
        out[dtype] = {
            "first": round(curves["fused"][0], 4),
            "last": round(curves["fused"][-1], 4),
            "last_ref": round(curves["ref"][-1], 4),
            "largest_difference": float(f"{difference:.3g}"),
        }
    return out


def train_scheduled() -> dict:
    """Training with replicas in mode "scheduled": the kernel's own solver plans every batch, the host none.

    On the GPUs of this group, or on 2, 4 and 8 ranks of one. What a plan decides, which rows are where, is compared in
    the end, on the trained layers.
    """
    from moe_ref.diff import compare
    from moe_ref.train.job import train
    from moe_ref.world import DistributedWorld, SimulatedWorld

    def no_plan(*_):
        raise AssertionError("a plan was made on the host before the launch")

    rank, device, out = rank_and_size()[0], torch.device("cuda", torch.cuda.current_device()), {}
    for world in [DistributedWorld()] if dist.is_initialized() else map(SimulatedWorld, one_gpu.RANKS):
        curves = {}
        for name in ("ref", "fused"):
            with mock.patch.object(backend, "plan_first", no_plan):
                outcome, training = train(replace(cases.SCHEDULED, backend=name), world, device)
            curves[name] = outcome.losses
        difference = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
        assert curves["fused"][-1] < 0.8 * curves["fused"][0], curves["fused"]
        assert difference < 0.1, f"{world}: losses differ by {difference} bits per byte from the reference's"
        plain, scheduled = (float(np.mean(ratios)) for ratios in (outcome.plain_TL, outcome.scheduled_TL))
        # with every expert on every rank, plain placement is even as well
        better = scheduled < plain or world.num_ranks == cases.SCHEDULED.replicas
        assert better, f"{world}: maximum over mean load {plain} plain, {scheduled} scheduled"
        g = torch.Generator(device="cuda").manual_seed(rank)
        errors: dict[str, float] = {}
        for layer in training.layers.values():
            assert engine_choice.engine_for(layer).shape.placed
            sizes = [(100 + 50 * p, layer.config.hidden) for p in world.local_ranks]
            xs = [torch.randn(size, device="cuda", generator=g).to(layer.config.torch_dtype) for size in sizes]
            report = compare("fused", "ref", layer, xs)
            assert report.ok, f"{world}: {report}"
            errors |= {b.buffer: max(b.relative_error, errors.get(b.buffer, 0.0)) for b in report.buffers}
        out[f"{world.num_ranks} ranks"] = {
            "first": round(curves["fused"][0], 4),
            "last": round(curves["fused"][-1], 4),
            "last_ref": round(curves["ref"][-1], 4),
            "largest_difference": float(f"{difference:.3g}"),
            "max_over_mean": {"plain": round(plain, 3), "scheduled": round(scheduled, 3)},
            "errors": {name: float(f"{error:.2g}") for name, error in errors.items()},
        }
    return out


def families() -> dict:
    """Blocks of transformers, every family, and the same layers on this kernel: ids equal, outputs within tolerance.

    The library's 16-bit sums are less exact than the kernel's fp32 ones, so the yardstick is its own module with the
    same weights in float64; how far its 16-bit module is from that stands beside.
    """
    from copy import deepcopy

    from hf_models import block_on

    from moe_fast.bench.library_blocks import chosen_ids
    from moe_ref.compat import from_transformers

    device, out = torch.device("cuda", torch.cuda.current_device()), {}
    for name, changes in cases.BLOCKS.items():
        block, x = block_on(name.split()[0], device, torch.bfloat16, changes, tokens=600)
        exact = deepcopy(block).double()
        layer = from_transformers(block, backend="fused")
        with torch.no_grad():
            ids, same = chosen_ids(block, x), chosen_ids(exact, x.double())
            # tokens whose logits are too close for 16 bits to tell apart say nothing about us
            x = x[:, (ids == same).all(1)]
            assert x.shape[1] >= 400, f"{name}: only {x.shape[1]} tokens without near ties"
            wanted, theirs = library_output(exact, x.double()), library_output(block, x)
            y, stats = layer(x, return_stats=True)
            mine = stats.record.routing[0].expert_SK.sort(-1).values
        assert torch.equal(mine, chosen_ids(block, x)), f"{name}: ids differ"
        errors = {"fused": harness.relative(y, wanted), "library": harness.relative(theirs, wanted)}
        errors["between"] = harness.relative(y, theirs)
        assert errors["fused"] <= harness.TOLERANCE[torch.bfloat16], (name, errors)
        assert errors["between"] <= harness.TOLERANCE[torch.bfloat16] + errors["library"], (name, errors)
        out[name] = {"tokens": x.shape[1], **{k: float(f"{v:.3g}") for k, v in errors.items()}}
        del block, exact, layer
        engine_choice.close_engines()
    return out


def tf32() -> dict:
    """A float32 layer's time against the same layer's in bfloat16, in turn: at most 2.3 times."""
    from moe_fast.bench import LAYERS, interleaved, set_up
    from moe_fast.router import router_parts

    out = {}
    for name in cases.TF32_TIMES:
        setups = {dtype: set_up(LAYERS[name].replace(dtype=dtype), 8192, "spare_warps") for dtype in cases.DTYPES[::2]}

        def call(setup):
            w = setup.weights
            router = w.router_EH
            if setup.engine.shape.router_parts > 1:
                router = router_parts(router, torch.float32)
            y = torch.empty_like(setup.x_SH)
            return lambda: setup.engine.launch(setup.x_SH, router, w.up_XUH, w.down_XHD, out=y)

        times = interleaved({dtype: call(setup) for dtype, setup in setups.items()}, 15)
        out[name] = {dtype: value["median"] for dtype, value in times.items()}
        out[name]["ratio"] = round(out[name]["float32"] / out[name]["bfloat16"], 3)
        for setup in setups.values():
            setup.engine.check()
            setup.engine.heap.close()
        del setups
    slow = {name: found for name, found in out.items() if found["ratio"] > cases.TF32_TIMES[name]}
    assert not slow, slow
    return out


def library_output(block, x: torch.Tensor) -> torch.Tensor:
    y = block(x)
    return y[0] if isinstance(y, tuple) else y


def small() -> dict:
    """One small call with patience, for running under compute-sanitizer."""
    case = replace(cases.SMALL, tokens=(150,), routing="gate")
    engine_for(case).deadline_s = 120.0
    return {"y": float(f"{run_case(case)['y']:.3g}")}


SCENARIOS = {
    f.__name__: f
    for f in (
        special, uneven, carried, solving, placed, layouts, transports, wire, repeat, graph, operations, wrong_input,
        refused, many, token_tiles, traced, layer, training, train_fused, train_scheduled, families, tf32, matrix,
        large, slow_start, replicas, timeout, small, pairs,
    )
} | one_gpu.SCENARIOS  # fmt: skip


def main(names: list[str]) -> int:
    """Run scenarios; print one JSON line each; 0 if all passed. `--out FILE` writes them with their provenance."""
    out = None
    if "--out" in names:
        at = names.index("--out")
        out, names = names[at + 1], names[:at] + names[at + 2 :]
    lines = []
    torch.backends.cuda.matmul.allow_tf32 = False
    if "RANK" in os.environ:
        os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(cases.heap_bytes(int(os.environ["WORLD_SIZE"]))))
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))
    rank, _ = rank_and_size()
    failed = 0
    for name in names or list(SCENARIOS):
        start = time.perf_counter()
        try:
            result, good = SCENARIOS[name](), True
        except Exception as error:  # every rank reports; the exit code fails the test
            result, good = {"error": f"{type(error).__name__}: {error}"[:1500]}, False
            if os.environ.get("TRACEBACK"):
                import traceback

                traceback.print_exc()
        if rank == 0 or not good:
            line = {
                "scenario": name,
                "rank": rank,
                "ok": good,
                "seconds": round(time.perf_counter() - start, 1),
                **result,
            }
            print(json.dumps(line), flush=True)
            lines.append(line)
        if not agree(good):
            failed += 1
            if dist.is_initialized() and "Timeout" in str(result):
                break
    if out is not None and rank == 0:
        from moe_fast.bench import PACKAGES
        from moe_ref.results import provenance, write_results

        ranks = rank_and_size()[1]
        start = "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
        command = f"{start} tests/gpu/scenarios.py {' '.join(names)}".strip()
        title = f"The megakernel's tests on {ranks} GPU{'s' * (ranks > 1)}"
        description = (
            "Every scenario of tests/gpu: differential matrix, repetition, graphs, timeouts, errors, training."
        )
        found = {"title": title, "description": description, **provenance(command, PACKAGES)}
        write_results(Path(out), {**found, "gpus": ranks, "scenarios": lines})
    sys.stdout.flush()
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
