"""Training with replicas on real ranks against one process without: gradients, weights, moves, shards, lost ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from train_jobs import (
    CONFIG,
    Case,
    dies,
    exchange_speed,
    global_batch,
    loss_sum,
    make_model,
    train_all,
    train_alone,
    train_in_subgroups,
)

from moe_ref import Placement, SimulatedWorld
from moe_ref.errors import UsageError
from moe_ref.train.buckets import Bucket, Piece
from moe_ref.train.optimizer import ReplicaOptimizer
from moe_ref.train.recompute import recompute
from moe_ref.train.replacement import replace as move
from moe_ref.train.replicated import Replicated

D1 = tuple((e % 4,) for e in range(6))
D2 = ((0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3))
D3 = ((0, 1, 2), (1, 2, 3), (2, 3, 0), (3, 0, 1), (2, 1, 0), (3, 1, 2))
MIXED = ((0, 1, 2, 3), (1,), (2, 3), (3, 0, 2), (0,), (1, 3))
GROUPS = ((0, 2), (1, 3), (0, 3), (1, 2), (0, 1, 2), (1, 2, 3))  # every expert in ranks {0, 1} and in {2, 3}
OTHER = ((3, 2), (2, 0), (0, 1, 3), (1,), (2, 1), (0, 3))
STARVED = (2, 5)

CASES = {
    "one replica": Case(D1),
    "two": Case(D2),
    "three": Case(D3),
    "mixed": Case(MIXED),
    "sharded": Case(MIXED, sharded=True),
    "two, accumulated, clipped": Case(D2, micro_batches=3, clip=0.05),
    "three, accumulated, clipped": Case(D3, micro_batches=3, clip=0.05),
    "sharded, accumulated, clipped": Case(MIXED, sharded=True, micro_batches=2, clip=0.05, steps=3),
    "starved experts, a rank without tokens": Case(MIXED, clip=0.05, starve=STARVED, empty_rank=True, micro_batches=2),
    "sharded, starved, empty": Case(D2, sharded=True, starve=STARVED, empty_rank=True, micro_batches=2),
    "two groups": Case(GROUPS, group_size=2, clip=0.05),
    "recomputed": Case(D2, recompute=True, micro_batches=2, clip=0.05),
    "a rank without experts": Case(((0, 1), (1, 2), (2, 0), (0,), (1,), (2, 1)), clip=0.05),
    "frozen, moved": Case(MIXED, steps=2, frozen=True, moves={1: OTHER}),
    "moved": Case(MIXED, steps=6, moves={2: OTHER, 4: D2}),
    "moved, sharded": Case(D3, steps=6, sharded=True, moves={1: OTHER, 3: MIXED}),
}
BF16 = "bf16, moved"
LONG = {
    BF16: Case(D3, steps=3, moves={1: OTHER}, config=replace(CONFIG, moe=CONFIG.moe.replace(dtype="bfloat16"))),
    "moved every 20": Case(MIXED, steps=100, learning_rate=1e-3, moves={20: OTHER, 40: D2, 60: MIXED, 80: D3}),
    "never moved": Case(MIXED, steps=100, learning_rate=1e-3),
}


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict]]:
    """results[case][rank]; all cases in one set of four processes."""
    cases = {**CASES, **LONG}
    by_rank = run_ranks(train_all, 4, list(cases.values()), timeout_s=400)
    return {name: [per_rank[i] for per_rank in by_rank] for i, name in enumerate(cases)}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    """The same in one process; runs that differ only in how they are distributed share their result."""
    made: dict[tuple, dict] = {}
    result = {}
    for name, case in CASES.items():
        key = (case.steps, case.micro_batches, case.clip, case.starve, case.frozen)
        if key not in made:
            made[key] = train_alone(case)
        result[name] = made[key]
    return result


def tensors(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """From logical keys to whole tensors: the experts of a parameter joined by their ids."""
    joined: dict[str, list] = {}
    for key in sorted(values, key=lambda k: (k.split("/")[0], int(k.split("/")[1]) if "/" in k else 0)):
        joined.setdefault(key.split("/")[0], []).append(values[key].astype(np.float64).ravel())
    return {name: np.concatenate(parts) for name, parts in joined.items()}


def everything(per_rank: list[dict], what: str) -> dict[str, np.ndarray]:
    """Values by logical key from all ranks, which must agree on every bit."""
    seen: dict[str, np.ndarray] = {}
    for rank, result in enumerate(per_rank):
        values = (
            result["gradients"]
            if what == "gradients"
            else {k: r[what] for k, r in result["records"].items() if what in r}
        )
        for key, value in values.items():
            if key in seen:
                assert np.array_equal(seen[key], value, equal_nan=True), (
                    f"{what} of {key} on rank {rank} has other bits"
                )
            seen.setdefault(key, value)
    return seen


def distance(a: np.ndarray, b: np.ndarray) -> float:
    norm = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / norm if norm else float(np.linalg.norm(a))


@pytest.mark.parametrize("name", list(CASES))
def test_equals_one_process(name: str, results, alone) -> None:
    got, want = results[name], alone[name]
    gradients, wanted = tensors(everything(got, "gradients")), tensors(want["gradients"])
    assert set(gradients) == set(wanted)
    # After several steps the weights differ by rounding, and the gradients at them by a little more.
    limit = 1e-6 if CASES[name].steps == 1 else 1e-5
    off = {key: distance(gradient, wanted[key]) for key, gradient in gradients.items()}
    assert max(off.values()) <= limit, off
    weights = tensors({key: record["weight"] for key, record in want["records"].items()})
    moved_off = {key: distance(weight, weights[key]) for key, weight in tensors(everything(got, "weight")).items()}
    assert max(moved_off.values()) <= 1e-5, moved_off
    print(f"{name}: gradients {max(off.values()):.1e}, weights {max(moved_off.values()):.1e} from one process")
    for moment in ("master", "exp_avg", "exp_avg_sq"):
        everything(got, moment)  # all replicas have the same bits
    for norms in [result["norms"] for result in got]:
        assert norms == got[0]["norms"]
        assert np.allclose(norms, want["norms"], rtol=1e-5)
        assert all(norm > 0.05 for norm in norms), "clipping did nothing in this case"


@pytest.mark.parametrize("name", [name for name in CASES if "starved" in name])
def test_a_starved_expert_has_a_zero_gradient(name: str, results) -> None:
    gradients = everything(results[name], "gradients")
    starved = [key for key in gradients if "/" in key and int(key.split("/")[1]) in STARVED]
    assert len(starved) == len(CONFIG.moe_blocks) * 2 * len(STARVED)
    assert not any(gradients[key].any() for key in starved)
    assert all(gradients[key].any() for key in gradients if "/" in key and key not in starved)


def test_shards_are_uneven_parts_of_their_sets(results) -> None:
    whole, parts = results["mixed"], results["sharded"]
    for rank in range(4):
        assert len(whole[rank]["shards"]) == len(parts[rank]["shards"])
        assert sum(parts[rank]["shards"]) < sum(whole[rank]["shards"])
    # Each number of the model is optimised exactly once.
    model = sum(value.size for value in everything(whole, "weight").values())
    assert sum(sum(result["shards"]) for result in parts) == model
    assert len({sum(result["shards"]) for result in parts}) > 1


def test_recomputation_does_not_plan_again(results) -> None:
    case = CASES["recomputed"]
    forwards = case.steps * case.micro_batches * len(case.config.moe_blocks)
    for result in results["recomputed"]:
        assert len(result["plans"]) == forwards
    assert len(results["three, accumulated, clipped"][0]["plans"]) == 3 * len(CONFIG.moe_blocks)


def test_groups_keep_their_tokens(results) -> None:
    """Nine sequences on four ranks: three on rank 0, two on each other; a group computes what its ranks bring."""
    for plan in results["two groups"][0]["plans"]:
        assert plan[0] + plan[1] == (3 + 2) * 12 * 2
        assert plan[2] + plan[3] == (2 + 2) * 12 * 2


def test_masters_of_a_layer_in_bf16(results) -> None:
    """Gradients are summed and weights updated in fp32; replicas agree on every bit, before and after a move."""
    weights, masters = everything(results[BF16], "weight"), everything(results[BF16], "master")
    for key, master in masters.items():
        rounded = torch.from_numpy(master).to(torch.bfloat16).float().numpy()
        assert np.array_equal(weights[key], rounded), key
    assert any(not np.array_equal(weights[key], masters[key]) for key in masters)


def test_frozen_experts_move_and_stay(results, alone) -> None:
    weights = everything(results["frozen, moved"], "weight")
    frozen = [key for key in weights if ".down_proj/" in key]
    assert len(frozen) == len(CONFIG.moe_blocks) * 6
    for key in frozen:
        assert np.array_equal(weights[key], alone["frozen, moved"]["records"][key]["weight"])
        assert "master" not in results["frozen, moved"][0]["records"].get(key, {})


@pytest.mark.parametrize("name", ["moved", "moved, sharded", "moved every 20", "frozen, moved", "bf16, moved"])
def test_a_forward_has_the_same_bits_before_and_after_a_move(name: str, results) -> None:
    case = {**CASES, **LONG}[name]
    for rank, result in enumerate(results[name]):
        assert result["same_bits"] == [True] * len(case.moves)
        assert all(moves > 0 for moves in result["moved"])
        last = list(case.moves.values())[-1]
        held = tuple(e for e, ranks in enumerate(last) if rank in ranks)
        assert all(experts == held for experts in result["held"].values())


def test_hundred_steps_with_and_without_moves(results) -> None:
    moved = tensors(everything(results["moved every 20"], "weight"))
    stayed = tensors(everything(results["never moved"], "weight"))
    worst = max(distance(moved[key], stayed[key]) for key in stayed)
    print(f"100 steps, moves every 20 against none: weights differ by {worst:.2e}")
    assert worst <= 1e-5


def test_worlds_that_are_subgroups() -> None:
    case = Case(
        ((0, 1), (1, 0), (0,), (1,), (0, 1), (1,)), ranks=2, steps=2, clip=0.05, moves={1: ((0,),) * 3 + ((1, 0),) * 3}
    )
    want = train_alone(case)
    by_rank = run_ranks(train_in_subgroups, 4, case)
    for pair in (by_rank[0::2], by_rank[1::2]):
        assert all(result["same_bits"] == [True] for result in pair)
        weights = tensors(everything(pair, "weight"))
        for key, weight in tensors({k: r["weight"] for k, r in want["records"].items()}).items():
            assert distance(weights[key], weight) <= 1e-5, key


def test_a_torch_optimizer_will_do_where_nothing_moves(one_thread) -> None:
    """One process stands for all ranks: the default denominator is one, and parameters have ordinary gradients."""
    case = Case(D2)
    batch = global_batch(case, 0)
    results = []
    for wrap in (False, True):
        model = make_model(case)
        training = Replicated(model, case.placement, SimulatedWorld(4)) if wrap else model
        optimizer = torch.optim.Adam(training.parameters(), lr=1e-3)
        (loss_sum(training, batch, case) / batch[:, 1:].numel()).backward()
        if isinstance(training, Replicated):
            training.synchronize()
            assert training.clip(1e9) > 0
        optimizer.step()
        results.append(model.state_dict())
    for name, value in results[0].items():
        assert distance(results[1][name].numpy(), value.numpy()) <= 1e-5, name


class _Operations(TorchDispatchMode):
    """Counts what the host has to dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_hosts_work_of_a_step_does_not_grow_with_experts(one_thread) -> None:
    """A copy for each expert kept the host busy for longer than the device."""
    counts = []
    for experts in (4, 32):
        case = Case(tuple((e % 4, (e + 1) % 4) for e in range(experts)))
        case = replace(case, config=replace(CONFIG, moe=CONFIG.moe.replace(experts=experts)))
        training = Replicated(make_model(case), case.placement, SimulatedWorld(4))
        optimizer = ReplicaOptimizer(training, torch.optim.AdamW, lr=1e-3)
        loss_sum(training, global_batch(case, 0), case).backward()
        with _Operations() as seen:
            training.synchronize()
            training.clip(1e-6)
            optimizer.step()
        counts.append(len(seen.names))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("slots", "runs"),
    [
        ((), []),
        ((3,), [[3]]),
        ((0, 1, 2, 3), [[0, 1, 2, 3]]),
        ((1, 3, 5), [[1, 3, 5]]),
        ((0, 1, 3, 5, 6), [[0, 1], [3, 5], [6]]),
        ((0, 4, 5, 6), [[0, 4], [5, 6]]),
    ],
)
def test_runs_are_all_pieces_in_their_order(slots, runs) -> None:
    """Rows of one parameter that are evenly spaced go together, never those of two parameters."""
    first, second = (torch.nn.Parameter(torch.arange(14.0).view(7, 2) + 100 * i) for i in range(2))
    dense = torch.nn.Parameter(torch.full((3,), -1.0))
    bucket = Bucket((0, 1), 0, torch.float64, True)
    bucket.pieces += [Piece(f"a/{s}", first, s) for s in slots] + [Piece("d", dense, None)]
    bucket.pieces += [Piece(f"b/{s}", second, s) for s in slots]
    found = [list(range(7))[run.slots] for run in bucket.runs if run.parameter is first and run.slots]
    assert found == runs
    assert len(bucket.runs) == 2 * len(runs) + 1
    expected = [*(piece.data.flatten() for piece in bucket.pieces)]
    assert torch.equal(bucket.values(), torch.cat(expected).double())
    before = [parameter.detach().clone() for parameter in (first, second)]
    bucket.write_values(bucket.values() + 1)
    for parameter, old in zip((first, second), before, strict=True):
        changed = torch.zeros(7, 1)
        changed[list(slots)] = 1
        assert torch.equal(parameter, old + changed)
    first.grad = torch.ones_like(first)
    gradient = bucket.gradients()
    assert gradient.sum() == 2 * len(slots)
    dense.grad, second.grad = torch.zeros_like(dense), torch.zeros_like(second)
    bucket.write_gradients(torch.arange(float(bucket.size), dtype=torch.float64))
    assert torch.equal(bucket.gradients(), torch.arange(float(bucket.size), dtype=torch.float64))


def test_wrong_order_is_named(one_thread) -> None:
    case = Case(D2)
    training = Replicated(make_model(case), case.placement, SimulatedWorld(4))
    optimizer = ReplicaOptimizer(training, torch.optim.SGD, lr=0.1, momentum=0.9)
    loss_sum(training, global_batch(case, 0), case).backward()
    with pytest.raises(RuntimeError, match=r"clip\(\) before synchronize\(\)"):
        training.clip(1.0)
    with pytest.raises(RuntimeError, match=r"step\(\) before synchronize\(\)"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="gradients are pending"):
        move(optimizer, {"blocks.1.ffn": Placement.from_replicas(D3, 4)})
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected a positive number, such as the tokens of all ranks"):
            training.synchronize(bad)
    training.synchronize(100)
    optimizer.step()
    with pytest.raises(UsageError, match=r"no MoE layer ffn; layers: blocks.1.ffn, blocks.2.ffn"):
        move(optimizer, {"ffn": case.placement})
    with pytest.raises(ValueError, match="moves are planned between placements of the same sizes"):
        move(optimizer, {"blocks.1.ffn": Placement.from_replicas([[0], [1]], 2)})
    # Momentum is a state like any other: it moves, although SGD counts no steps.
    before = optimizer.export()
    move(optimizer, {"blocks.1.ffn": Placement.from_replicas(D3, 4)})
    after = optimizer.export()
    assert set(before["embed.weight"]) == {"weight", "master", "momentum_buffer"}
    assert all(torch.equal(after[key][name], value) for key, record in before.items() for name, value in record.items())
    with pytest.raises(UsageError, match=r"placements are for \['x'\], expected one for each of"):
        Replicated(make_model(case), {"x": case.placement}, SimulatedWorld(4))
    with pytest.raises(UsageError, match="the model has no MoELayer"):
        Replicated(torch.nn.Linear(2, 2), case.placement, SimulatedWorld(4))


def test_recomputation_that_is_not_the_forward_again(one_thread) -> None:
    case = Case(D2)
    model = make_model(case)
    training = Replicated(model, case.placement, SimulatedWorld(4))
    logits, _ = recompute(training, global_batch(case, 0)[:, :-1])
    training.layers["blocks.1.ffn"].placement = Placement.from_replicas(D3, 4)
    with pytest.raises(RuntimeError, match="the placement changed between forward and backward"):
        logits.sum().backward()


def test_neighbour_exchange_is_faster() -> None:
    """Paired in the same run: one all-reduce per expert against one message per neighbour."""
    measured = run_ranks(exchange_speed, 4, 16, 20_000, 40)
    ratio = float(np.median([result["ratio"] for result in measured]))
    print(f"16 experts x 20,000 floats on 4 ranks: {measured[0]}")
    # Twice as fast is asked for, and checked in tests/benchmarks. Here other tests share the cores, and four processes
    # that wait for each other suffer most from that.
    assert ratio >= 1.0


@pytest.mark.parametrize(("victim", "step", "where"), [(1, 0, "forward"), (2, 1, "synchronize"), (0, 2, "clip")])
def test_a_rank_that_dies_is_named_in_bounded_time(victim: int, step: int, where: str) -> None:
    results = run_ranks(dies, 3, victim, step, where, lost=(victim,))
    for rank, result in enumerate(results):
        if rank != victim:
            assert f"rank {rank} lost another rank during training" in result["error"]
            assert "Go on from the last checkpoint with --resume" in result["error"]
            assert result["seconds"] < 60
