"""Real ranks (gloo processes) against simulated ones: the same bits, the same gradients, the same errors."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import rank_jobs
import torch
import torch.distributed as dist
from ranks import run_ranks

from moe_ref import DistributedWorld, MoEConfig, MoELayer, Placement, cases
from moe_ref.definition import relative_error
from moe_ref.errors import UsageError

BASE = MoEConfig(hidden=32, intermediate=48, experts=10, top_k=3)
RING = [[e % 4, (e + 1) % 4] for e in range(10)]

JOBS = [
    (BASE, [7, 0, 30, 1], None, None, 1),
    (BASE.replace(layout="fixed"), [7, 0, 30, 1], None, None, 2),
    (BASE, [0, 0, 0, 0], None, None, 3),
    (BASE, [16, 16, 16, 16], "one_expert", None, 4),
    (BASE, [5, 40, 3, 17], "masked", None, 5),
    (BASE, [5, 40, 3, 17], "all_masked", None, 6),
    (BASE.replace(capacity_factor=0.6), [20, 20, 3, 0], None, None, 7),
    (BASE.replace(dtype="bfloat16"), [20, 11, 3, 0], "duplicates", None, 8),
    (BASE.replace(gated=False, activation="relu"), [20, 11, 3, 9], "zipf", RING, 9),
    (BASE.replace(experts=3, top_k=2), [20, 11, 3, 9], None, None, 10),  # the last rank holds no expert
    (BASE.replace(wire_format="tokens", top_k=6), [7, 0, 30, 1], None, None, 11),
    (BASE.replace(wire_format="tokens", experts=3, top_k=2), [20, 11, 3, 0], None, None, 12),
    (BASE.replace(wire_format="tokens", dtype="bfloat16", top_k=6), [5, 40, 3, 17], "masked", RING, 13),
    (BASE.replace(wire_format="tokens"), [5, 4, 3, 7], "all_masked", None, 14),
]


@pytest.fixture(scope="module")
def results() -> list[list[dict]]:
    """results[rank][job] of all jobs on four processes."""
    return run_ranks(rank_jobs.many_forwards, 4, JOBS)


@pytest.mark.parametrize("job", range(len(JOBS)))
def test_real_ranks_equal_simulated_ones(job: int, results, one_thread, same_rows) -> None:
    config, sizes, kind, replicas, seed = JOBS[job]
    placement = None if replicas is None else Placement.from_replicas(replicas, 4)
    layer = MoELayer(config, world=4, placement=placement, seed=seed)
    inputs = [rank_jobs.rank_input(config, sizes, rank, kind, seed) for rank in range(4)]
    xs = [x.requires_grad_() for x, _ in inputs]
    ys, stats = layer(xs, routing=None if kind is None else [r for _, r in inputs], return_stats=True)
    sum(y.double().square().sum() for y in ys).backward()

    for rank in range(4):
        got = results[rank][job]
        assert same_rows(torch.from_numpy(got["y"]), ys[rank].double())
        assert relative_error(torch.from_numpy(got["x_grad"]), xs[rank].grad.double()) <= 1e-6
        assert got["expert_load"].tolist() == stats.expert_load.tolist()
        assert got["rank_load"].tolist() == stats.rank_load.tolist()
        assert got["tokens"].tolist() == sizes
        assert (got["bytes_remote"], got["dropped"]) == (stats.bytes_remote, stats.dropped)
        assert got["plan"] == stats.record.plan.digest()

    # Gradients of an expert add up over its replicas; router gradients add up over ranks.
    for name in results[0][job]["expert_grads"]:
        total = np.zeros(getattr(layer, name).shape, dtype=np.float64)
        for rank in range(4):
            for expert, gradient in results[rank][job]["expert_grads"][name].items():
                total[expert] += gradient if config.dtype != "bfloat16" else np.asarray(gradient, dtype=np.float64)
        limit = 1e-6 if config.dtype == "float32" else 2e-2
        assert relative_error(torch.from_numpy(total), getattr(layer, name).grad) <= limit
    if kind is None:
        routers = sum(results[rank][job]["router_grad"] for rank in range(4))
        assert relative_error(torch.as_tensor(routers), layer.router.weight.grad) <= 1e-5


def test_configs_must_agree() -> None:
    messages = run_ranks(rank_jobs.different_configs, 2)
    assert all("MoEConfig differs between ranks: rank 0 has" in message for message in messages)


def test_an_error_reaches_every_rank() -> None:
    messages = run_ranks(rank_jobs.one_bad_rank, 3)
    assert "rank 1: the gate's logit of token 2" in messages[1]
    assert messages[0] == messages[2] == "rank 1 refused its input; its own message says why"


def test_checkpoint_of_all_experts(one_thread, same_rows) -> None:
    results = run_ranks(rank_jobs.checkpoint_round_trip, 2)
    config = MoEConfig(hidden=16, intermediate=24, experts=5, top_k=2)
    layer = MoELayer(config, world=2, seed=11)
    ys = layer([cases.make_tokens(9, config, rank) for rank in range(2)])
    for got, want in zip(results, ys, strict=True):
        assert same_rows(torch.from_numpy(got), want)


def test_every_refusal_reaches_every_rank() -> None:
    messages = run_ranks(rank_jobs.refused, 2)
    assert messages[0] == ["rank 1 refused its input; its own message says why"] * 6 + ["(3, 8)"]
    expected = (
        "x has shape [3, 7]",
        "is torch.float64",
        "has 10 tokens",
        "torch.uint8",
        "is 4, expected an id",
        "is str",
    )
    assert all(text in message for text, message in zip(expected, messages[1], strict=False))


def test_settings_must_agree() -> None:
    messages = run_ranks(rank_jobs.different_settings, 2)
    assert all("ranks [1] run with another dtype (autocast?)" in message for message in messages)


def test_a_backward_that_some_ranks_do_not_need() -> None:
    assert run_ranks(rank_jobs.frozen_router, 3) == [[True, True], [False, True], [False, False]]


def test_second_derivative() -> None:
    results = run_ranks(rank_jobs.second_derivative, 2)
    config = MoEConfig(hidden=6, intermediate=5, experts=4, top_k=2, dtype="float64", activation="gelu")
    layer = MoELayer(config, world=2, seed=3)
    xs = [cases.make_tokens(7, config, rank).requires_grad_() for rank in range(2)]
    routing = [cases.make_routing("uniform", 7, config, rank) for rank in range(2)]
    loss = sum(y.square().sum() for y in layer(xs, routing=routing))
    first = torch.autograd.grad(loss, xs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), xs)
    for got, want in zip(results, second, strict=True):
        assert relative_error(torch.from_numpy(got), want) <= 1e-12


def test_without_a_process_group() -> None:
    with pytest.raises(UsageError, match=r"not initialised; start the program with torchrun"):
        DistributedWorld()
    with pytest.raises(UsageError, match=r"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        DistributedWorld.from_environment()


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (1, "gloo"), (2, "nccl"), (8, "nccl")])
def test_ranks_use_gpus_only_if_there_is_one_for_each(monkeypatch, gpus: int, backend: str) -> None:
    """Ranks of one machine must decide alike, or they would wait for each other in two kinds of group."""
    chosen = []
    for rank in (0, 1):
        for name, value in (("WORLD_SIZE", 2), ("RANK", rank), ("LOCAL_RANK", rank), ("MASTER_PORT", 1)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(dist, "init_process_group", lambda name, timeout: chosen.append(name))
        with pytest.raises(UsageError, match="not initialised"):
            DistributedWorld.from_environment()
    assert chosen == [backend, backend]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_do_not_meet(rank: str, monkeypatch) -> None:
    """Rank 0 finds its port taken, rank 1 nobody who answers: both say where they looked, and what to check."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # never listens
        port = str(taken.getsockname()[1])
        for name, value in (("WORLD_SIZE", "2"), ("RANK", rank), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, value)
        with pytest.raises(
            UsageError, match=rf"rank {rank} can't join the 2 ranks that meet at 127.0.0.1:{port} .*port"
        ):
            DistributedWorld.from_environment(2.0)
