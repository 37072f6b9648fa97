"""Scenarios of several ranks on one GPU: 2, 4 and 8 kernels side by side, with all that crosses between them.

Like those of `scenarios.py`, which runs them: each returns a small dict and raises AssertionError on what is wrong.
Here one process is all ranks.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

import cases
import harness
import torch
from harness import Case, group_for, launch_together, make_inputs, run_together, seat

from moe_fast import engine_choice
from moe_fast.blocks import LEAST_BLOCKS
from moe_fast.failures import MegakernelInputError, MegakernelTimeout
from moe_ref.layout import ceil_div

RANKS = (2, 4, 8)


def inputs_of(case: Case, ranks: int, seed: int = 0) -> harness.Inputs:
    with seat(0, ranks):
        return make_inputs(case, seed)


def tried(every: list[tuple[Case, int, int]]) -> dict:
    """Each (case, ranks, seed), compared tile for tile; what was worst."""
    worst: dict[str, float] = {}
    failures = []
    for case, ranks, seed in every:
        try:
            for name, value in run_together(case, ranks, seed).items():
                key = f"{name} {case.dtype}"
                worst[key] = max(worst.get(key, 0.0), value)
        except (AssertionError, MegakernelTimeout, MegakernelInputError) as error:
            failures.append(f"{ranks} ranks, {case}: {type(error).__name__}: {error}")
            if isinstance(error, MegakernelTimeout):
                group_for(case, ranks).recover()
                # one says what the others would, each after its deadline
                break
    assert not failures, f"{len(failures)} of {len(every)} cases: " + " | ".join(failures[:5])
    return {"cases": len(every), "worst": {k: float(f"{v:.3g}") for k, v in worst.items()}}


def several_matrix() -> dict:
    """The differential matrix on 2, 4 and 8 ranks, poisoned before each call; every rank's buffers compared."""
    out = {}
    for ranks in RANKS:
        every = []
        for number in range(len(cases.SHAPES if ranks == 2 else cases.SEVERAL)):
            # of two ranks those shapes that two GPUs run with every S, each with one
            some = cases.several_cases(number, ranks) if ranks > 2 else [cases.cases_of(number)[number % 8]]
            every += [(one, ranks, 100 * number + i) for i, one in enumerate(some) if one.transport == "stores"]
        out[f"{ranks} ranks"] = tried(every)
    return out


def several_uneven() -> dict:
    """Numbers of experts that the ranks don't divide; some ranks, or all, without tokens; the shipped model's layer."""
    out = {}
    for ranks in RANKS:
        every = [
            (replace(one, routing=harness.ROUTINGS[(number + ranks) % len(harness.ROUTINGS)]), ranks, number)
            for number, one in enumerate(cases.uneven(ranks))
        ]
        for tokens in ((0,), (0, 300), (1,), (1000, 0, 0, 1)):
            every.append((replace(cases.TINY, tokens=tokens), ranks, 7))
        out[f"{ranks} ranks"] = tried(every)
    return out


def several_bits() -> dict:
    """No bit of a result depends on the number of ranks that share the work, or of blocks that a rank has for it."""
    out = {}
    for case in (cases.SMALL, cases.TINY):
        one = replace(case, tokens=(960,))
        whole = make_inputs(one, 3)
        results = {}
        for ranks in (1, *RANKS):
            group = group_for(one, ranks)
            parts = replace(whole, x=list(whole.x[0].chunk(ranks)), placement=one.placement(ranks))
            ys = launch_together(group, parts)
            group.check()
            results[ranks] = torch.cat(ys)
        different = [ranks for ranks, y in results.items() if not torch.equal(y, results[1])]
        assert not different, f"{one}: other bits on {different} ranks than on one"
        out[f"{one.experts} experts"] = {"ranks": list(results), "bit_identical": True}
    harness.close_engines()
    grids = []
    for case, ranks in (
        *((replace(one, scheduler=s), 1) for one in (cases.SMALL, cases.QWEN3) for s in cases.SCHEDULERS),
        (replace(cases.SMALL, replicas="mixed"), 2),
        *((one, 2) for one in cases.WIRE[:4]),
        (cases.SMALL, 4),
    ):
        # a pair of blocks is one processor
        step = 2 if case.shape(ranks).paired else 1
        least = ceil_div(LEAST_BLOCKS[case.scheduler], step) * step
        one = replace(case, tokens=(700, 300, 129, 0), routing="gate")
        results, inputs = {}, inputs_of(one, ranks, 5)
        for blocks in (None, 16, least + step, least):
            group = group_for(one, ranks, blocks=blocks)
            group.poison()
            results[blocks] = launch_together(group, inputs)
            group.check()
        for blocks, ys in results.items():
            same = all(torch.equal(a, b) for a, b in zip(ys, results[None], strict=True))
            assert same, f"{ranks} ranks, {one}: other bits with {blocks} blocks a rank than with all"
        grids.append(f"{ranks} ranks, {one.scheduler}, {one.experts} experts: {[b for b in results if b]} blocks")
        harness.close_engines()
    return {**out, "grids": grids}


def several_repeat() -> dict:
    """A hundred calls back to back with changing S and routing, none waited for; then each alone: the same bits."""
    out = {}
    for ranks in RANKS:
        for case in (cases.SMALL, replace(cases.SMALL, replicas="mixed"), cases.WIRE[3]):
            group = group_for(case, ranks)
            inputs = inputs_of(replace(case, tokens=(4096,), routing="gate"), ranks, 5)
            held = [inputs.chain(inputs.placement.experts_of_rank[rank]) for rank in range(ranks)]
            kinds, plans = ("gate", "zipf", "one_expert", "one_rank", "masked", "duplicates"), []
            generator = torch.Generator().manual_seed(11)
            for call in range(100):
                sizes = torch.randint(0, 900, (ranks,), generator=generator).tolist()
                if call % 17 == 3:
                    sizes[call % ranks] = 0
                starts = torch.randint(0, 3000, (ranks,), generator=generator).tolist()
                plan: dict[str, list] = {"x": [x[a : a + n] for x, a, n in zip(inputs.x, starts, sizes, strict=True)]}
                kind = kinds[call % len(kinds)]
                if kind != "gate":
                    g = torch.Generator(device="cuda").manual_seed(call)
                    with seat(0, ranks):
                        one = replace(case, routing=kind)
                        plan["expert_SK"] = [
                            harness.make_ids(one, n, rank, g, inputs.first.device) for rank, n in enumerate(sizes)
                        ]
                    plan["weight_SK"] = [torch.rand(n, case.top_k, device="cuda", generator=g) for n in sizes]
                plans.append(plan)
            group.poison()
            together = [launch_together(group, inputs, held=held, **plan) for plan in plans]
            group.check()
            different = []
            for number, plan in enumerate(plans):
                if number % 10 == 0:
                    group.poison()
                alone = launch_together(group, inputs, held=held, **plan)
                group.check()
                if not all(torch.equal(a, b) for a, b in zip(alone, together[number], strict=True)):
                    different.append(number)
            assert not different, f"{ranks} ranks, {case}: calls {different[:10]} have other bits alone"
            out[f"{ranks} ranks {case.replicas} {'tokens' if case.form.get('wire_format') else 'routes'}"] = len(plans)
    return out


def several_streams() -> dict:
    """The caller's stream is respected, and two groups called on two streams don't hold each other's SMs."""
    one, other = replace(cases.SMALL, tokens=(700, 300)), replace(cases.TINY, tokens=(300, 77))
    parts = [(group_for(case, ranks), inputs_of(case, ranks)) for case, ranks in ((one, 2), (other, 4))]
    wanted = []
    for group, inputs in parts:
        wanted.append(launch_together(group, inputs))
        group.check()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    late = [[torch.empty_like(x) for x in inputs.x] for _, inputs in parts]
    found = [[], []]
    torch.cuda.synchronize()
    for turn in range(20):
        for i, (stream, (group, inputs)) in enumerate(zip(streams, parts, strict=True)):
            with torch.cuda.stream(stream):
                if turn % 5 == 0:
                    torch.cuda._sleep(2_000_000)
                for target, x in zip(late[i], inputs.x, strict=True):
                    target.copy_(x)
                found[i].append(launch_together(group, replace(inputs, x=late[i])))
                for target in late[i]:
                    target.fill_(float("nan"))
    for i, (stream, (group, _)) in enumerate(zip(streams, parts, strict=True)):
        stream.synchronize()
        group.check()
        for ys in found[i]:
            assert all(torch.equal(a, b) for a, b in zip(ys, wanted[i], strict=True)), "a stream was not respected"
    return {"calls": sum(map(len, found))}


def several_graph() -> dict:
    """Captured in a CUDA graph as kernels beside each other and nothing else; replays with changing inputs."""
    from scenarios import node_kinds

    out = {}
    for ranks in RANKS:
        case = replace(cases.SMALL, tokens=(700, 300, 0, 129))
        group = group_for(case, ranks)
        sets = [inputs_of(case, ranks, seed) for seed in range(4)]
        wanted = []
        for one in sets:
            wanted.append(launch_together(group, one))
            group.check()
        held = inputs_of(case, ranks, 0)
        ys = [torch.empty_like(x) for x in held.x]
        stream, recorded = torch.cuda.Stream(), torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(stream), torch.cuda.graph(recorded, stream=stream):
            launch_together(group, held, out=ys)
        kinds = node_kinds(recorded)
        assert kinds.pop("kernel") == ranks, kinds
        assert set(kinds) <= {"empty", "waitevent", "eventrecord"}, f"more than kernels in the graph: {kinds}"
        recorded.instantiate()
        wrong = 0
        for number in range(100):
            chosen = number * 7 % 4
            for name in ("router", "first", "second"):
                getattr(held, name).copy_(getattr(sets[chosen], name))
            for x, y, source in zip(held.x, ys, sets[chosen].x, strict=True):
                x.copy_(source)
                y.fill_(float("nan"))
            recorded.replay()
            torch.cuda.synchronize()
            wrong += not all(torch.equal(y, want) for y, want in zip(ys, wanted[chosen], strict=True))
        group.check()
        assert wrong == 0, f"{ranks} ranks: {wrong} of 100 replays differ"
        out[f"{ranks} ranks"] = {"replays": 100, "other_nodes": kinds}
    return out


def several_failures() -> dict:
    """A rank that never begins ends the others with an error that names it; wrong input of one is told once."""
    out = {}
    for ranks in RANKS:
        case = replace(cases.SMALL, tokens=(200, 300))
        group, inputs = group_for(case, ranks), inputs_of(case, ranks)
        good = launch_together(group, inputs)
        group.check()
        usual = [engine.deadline_s for engine in group.engines]
        for engine in group.engines:
            engine.deadline_s = 0.3
        begin, message = time.perf_counter(), ""
        launch_together(group, inputs, absent=[ranks - 1])
        try:
            group.check()
        except MegakernelTimeout as error:
            message = str(error)
        took = time.perf_counter() - begin
        assert f"counts of rank {ranks - 1}" in message, f"an absent rank: {message!r}"
        assert took < 3, f"it took {took:.1f} s"
        try:
            launch_together(group, inputs)
            raise RuntimeError("a call after a timeout went through")
        except MegakernelTimeout:
            pass
        for engine, patience in zip(group.engines, usual, strict=True):
            engine.deadline_s = patience
        group.recover()
        for kind in ("", "nan", "id"):
            wrong = inputs_of(replace(case, routing="uniform" if kind == "id" else "gate"), ranks)
            if kind == "nan":
                wrong.x[ranks - 1][17, 3] = float("nan")
            elif kind == "id":
                assert wrong.expert is not None
                wrong.expert[ranks - 1][5, 1] = 10**9
            told = ""
            if kind:
                launch_together(group, wrong)
                try:
                    group.check()
                except MegakernelInputError as error:
                    told = str(error)
                assert ("not finite" if kind == "nan" else "outside [-1, E)") in told, f"{kind}: {told!r}"
            group.raise_if_failed()
            again = launch_together(group, inputs)
            group.check()
            same = all(torch.equal(a, b) for a, b in zip(again, good, strict=True))
            assert same, f"{ranks} ranks: the call after {kind or 'recovery'} differs"
        out[f"{ranks} ranks"] = {"message": message, "seconds": round(took, 3)}
    return out


def layer_of(ranks: int, name: str, placement=None, **changes):
    from moe_ref import MoEConfig, MoELayer

    config = MoEConfig(**{**cases.LAYER, "max_tokens": 1024, **changes})
    return MoELayer(config, backend=name, world=ranks, placement=placement, device="cuda")


def several_layers() -> dict:
    """MoELayer on simulated ranks against the reference: buffers, statistics, gradients, a host's plan; refusals."""
    from moe_ref.diff import compare

    out: dict = {}
    for ranks in RANKS:
        some = replace(cases.SMALL, replicas="mixed").placement(ranks)
        for name, changes in (
            ("plain", {}),
            ("replicas", {"placement": some}),
            ("linear program", {"placement": some}),
            ("tokens", cases.WIRE_LAYER),
            ("capacity", {"capacity_factor": 0.7}),
        ):
            one = layer_of(ranks, "fused", **changes)
            one.schedule_method = "lp" if name == "linear program" else "flow"
            g = torch.Generator(device="cuda").manual_seed(ranks)
            xs = [torch.randn(150 * (p % 3), 512, device="cuda", generator=g).to(torch.bfloat16) for p in range(ranks)]
            with torch.no_grad():
                report = compare("fused", "ref", one, xs)
                assert report.ok, f"{ranks} ranks, {name}: {report}"
                _, stats = one(xs, return_stats=True)
            assert list(stats.tokens_per_rank) == [len(x) for x in xs]
            out[f"{ranks} ranks, {name}"] = {b.buffer: float(f"{b.relative_error:.2g}") for b in report.buffers}
            if name != "linear program":
                out[f"{ranks} ranks, {name}"]["gradients"] = gradients_on(ranks, xs, changes)
    messages = []
    most = torch.cuda.get_device_properties(0).multi_processor_count // LEAST_BLOCKS[engine_choice.DEFAULT_SCHEDULER]
    for wanted, attempt in (
        ("put_signal", lambda: engine_choice.engine_for(layer_of(2, "fused"), transport="put_signal")),
        (f"at most {most} ranks", lambda: engine_choice.engine_for(layer_of(most + 1, "fused", experts=32))),
        ("--ranks 1 or torchrun", lambda: layer_of(2, "unfused")([torch.zeros(0, 512).cuda().bfloat16()] * 2)),
        ("CUDA_LAUNCH_BLOCKING", blocking_launches),
    ):
        messages.append(harness.refusal(attempt, wanted))
    return {**out, "refused": messages}


def blocking_launches() -> None:
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    try:
        layer_of(2, "fused")([torch.zeros(3, 512).cuda().bfloat16()] * 2)
    finally:
        del os.environ["CUDA_LAUNCH_BLOCKING"]


def gradients_on(ranks: int, xs: list[torch.Tensor], changes: dict) -> float:
    """Largest relative error of a gradient beyond what the reference's own bf16 backward has; both against float64."""
    fused, gradients = layer_of(ranks, "fused", **changes), {}
    g = torch.Generator(device="cuda").manual_seed(1)
    upstream = [torch.randn(x.shape, device="cuda", generator=g).to(torch.bfloat16) for x in xs]
    for name, dtype in (("fused", "bfloat16"), ("ref", "bfloat16"), ("exact", "float64")):
        one = fused if name == "fused" else layer_of(ranks, "ref", **{**changes, "dtype": dtype})
        with torch.no_grad():
            for target, source in zip(one.parameters(), fused.parameters(), strict=True):
                target.copy_(source)
        inputs = [x.detach().clone().to(one.config.torch_dtype).requires_grad_(True) for x in xs]
        ys = one(inputs)
        torch.autograd.backward(ys, [u.to(y.dtype) for u, y in zip(upstream, ys, strict=True)])
        whole = torch.cat([x.grad if x.grad is not None else torch.zeros_like(x) for x in inputs])
        gradients[name] = {"x": whole} | {n: p.grad for n, p in one.named_parameters()}
    worst = 0.0
    for name, exact in gradients["exact"].items():
        mine, reference = (harness.relative(gradients[b][name], exact) for b in ("fused", "ref"))
        assert mine <= 1.5 * reference + 2e-3, f"gradient of {name}: {mine:.2e}, the reference's own {reference:.2e}"
        worst = max(worst, mine - reference)
    return float(f"{worst:.2g}")


def several_training() -> dict:
    """The training loop on simulated ranks with its MoE layers in the megakernel, beside the same on the reference."""
    from moe_ref.train.job import TrainJob, train
    from moe_ref.world import SimulatedWorld

    device, out = torch.device("cuda", torch.cuda.current_device()), {}
    for ranks in RANKS:
        task = TrainJob(
            steps=15, replicas=1, balancing="plain", interval=0, balance=0.0, z=0.0, dtype="bfloat16", sequences=12
        )
        curves = {}
        for name in ("ref", "fused"):
            outcome, _ = train(replace(task, backend=name), SimulatedWorld(ranks), device)
            curves[name] = outcome.losses
        difference = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
        assert curves["fused"][-1] < 0.8 * curves["fused"][0], curves["fused"]
        assert difference < 0.1, f"{ranks} ranks: losses differ by {difference} bits per byte from the reference's"
        out[f"{ranks} ranks"] = {
            "first": round(curves["fused"][0], 4),
            "last": round(curves["fused"][-1], 4),
            "last_ref": round(curves["ref"][-1], 4),
            "largest_difference": float(f"{difference:.3g}"),
        }
    return out


SCENARIOS = {
    f.__name__: f
    for f in (
        several_matrix, several_uneven, several_bits, several_repeat, several_streams, several_graph, several_layers,
        several_training, several_failures,
    )
}  # fmt: skip
