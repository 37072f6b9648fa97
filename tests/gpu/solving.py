"""The kernel's solver alone, one batch of counts per block: compared with `moe_ref.balance` plan by plan, and timed.

python tests/gpu/solving.py OUT.json [--loads FILE]      real loads as well, see `moe_ref.balance.loads.read_loads`
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
import numpy as np
import torch
from cutlass import Int32, Int64

from moe_fast.kernel import solver
from moe_fast.kernel.regions import placement_tables
from moe_fast.kernel.scans import CONSUMERS, sync_consumers
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import gmem, read, write
from moe_ref import balance
from moe_ref.balance.loads import LoadModel, RealLoads, read_loads
from moe_ref.config import MoEConfig
from moe_ref.placement import Placement

ROOT = Path(__file__).resolve().parents[2]
SIZES = ((8, 2, 2), (32, 2, 2), (128, 2, 2), (32, 4, 2), (32, 8, 2), (64, 8, 2), (64, 8, 3))
"""(E, P, largest D): each on four placements of random sets of 1 to D ranks, and one of two ranks for every expert."""
SKEWS = (0.0, 0.5, 1.0, 1.2, 2.0)
"""Zipf's exponent of each of these placements' loads."""


class DeviceSolver:
    """Plans of many batches on the device, with as many threads as the planner has.

    Args:
        shape: sizes E, D, P and X; the rest of the kernel doesn't matter.
    """

    def __init__(self, shape: KernelShape) -> None:
        self.shape = shape
        self.run = cute.compile(self, Int64(1 << 20), Int64(1 << 20), Int64(1 << 20), Int64(1 << 20), Int32(1))

    @cute.jit
    def __call__(self, tables: Int64, counts: Int64, quota: Int64, times: Int64, cases: Int32):
        self.kernel(tables, counts, quota, times).launch(grid=(cases, 1, 1), block=(CONSUMERS, 1, 1))

    @cute.kernel
    def kernel(self, tables: Int64, counts_at: Int64, quota: Int64, times: Int64):
        k, w = self.shape, solver.words_of(self.shape)
        thread, _, _ = cute.arch.thread_idx()
        case, _, _ = cute.arch.block_idx()
        pairs = k.experts * k.replicas
        memory = utils.SmemAllocator().allocate_array(Int32, w.total)
        m = cute.make_tensor(memory, cute.make_layout(w.total))
        at = counts_at + Int64(case) * (4 * k.ranks * k.experts)
        counts = cute.make_tensor(gmem(at), cute.make_layout(k.ranks * k.experts))
        slots = k.ranks * k.slots
        for i in range(thread, pairs + slots + w.rounds + 1 - w.turn, CONSUMERS):
            value = read(tables, i)
            if i < pairs:
                m[w.rank + i] = value
            elif i < pairs + slots:
                m[w.held + i - pairs] = value
            else:
                m[w.turn + i - pairs - slots] = value
        sync_consumers()
        if thread < k.experts:
            solver.begin_tables(k, m, thread)
            total = Int32(0)
            for p in cutlass.range_constexpr(k.ranks):
                total += counts[p * k.experts + thread]
            for j in cutlass.range_constexpr(k.replicas):
                rank = m[w.rank + thread * k.replicas + j]
                own = Int32(0)
                if rank >= 0:
                    own = counts[rank * k.experts + thread]
                m[w.start + thread * k.replicas + j] = own
            solver.begin_expert(k, m, thread, total)
        sync_consumers()
        if thread < solver.WARP:
            begun = cute.arch.globaltimer()
            solver.solve(k, m, thread)
            if thread == 0:
                write(times, case, cute.arch.globaltimer() - begun, Int64)
        sync_consumers()
        saved = cute.make_rmem_tensor(k.replicas, Int32)
        if thread < k.experts:
            for j in cutlass.range_constexpr(k.replicas):
                saved[j] = m[w.start + thread * k.replicas + j]
            for p in range(k.ranks):
                for j in cutlass.range_constexpr(k.replicas):
                    m[w.start + thread * k.replicas + j] = saved[j]
                solver.route_expert(k, m, thread, counts, Int32(k.experts), p)
                for j in cutlass.range_constexpr(k.replicas):
                    v = thread * k.replicas + j
                    write(quota, (case * k.ranks + p) * pairs + v, m[w.start + v])

    def plan(self, counts_NPE: np.ndarray, placement: Placement) -> tuple[np.ndarray, np.ndarray]:
        """(quotas int64 [N, P, E, D], ns of each solve, int64 [N])."""
        k = self.shape
        tables = torch.from_numpy(placement_tables(placement, k.replicas, k.slots)).cuda()
        counts = torch.from_numpy(np.ascontiguousarray(counts_NPE, dtype=np.int32)).cuda()
        quota = torch.zeros(len(counts), k.ranks, k.experts, k.replicas, dtype=torch.int32, device="cuda")
        times = torch.zeros(len(counts), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        addresses = (Int64(t.data_ptr()) for t in (tables, counts, quota, times))
        self.run(*addresses, Int32(len(counts)))
        torch.cuda.synchronize()
        return quota.cpu().numpy().astype(np.int64), times.cpu().numpy()


@dataclass(frozen=True)
class Group:
    """Batches that are solved on one placement. counts_NPE: int64 [N, P, E]."""

    name: str
    replicas: int
    placement: Placement
    counts_NPE: np.ndarray


def two_each(experts: int, ranks: int) -> Placement:
    """Every expert on two ranks that differ from its neighbour's."""
    pairs = [(e % ranks, (e + e // ranks + 1) % ranks) for e in range(experts)]
    return Placement.from_replicas([(a, b if a != b else (a + 1) % ranks) for a, b in pairs], ranks)


def groups(batches: int, real: list[RealLoads]) -> Iterator[Group]:
    """`batches` of each of SIZES and SKEWS; then the real loads, P consecutive steps of a layer as P ranks' counts."""
    generator = np.random.default_rng(5)
    for experts, ranks, most in SIZES:
        for number, skew in enumerate(SKEWS):
            sets = [generator.permutation(ranks)[: generator.integers(1, most + 1)] for _ in range(experts)]
            last = number == len(SKEWS) - 1
            placement = two_each(experts, ranks) if last else Placement.from_replicas(sets, ranks)
            model = LoadModel(ranks, experts, skew, rows_per_rank=16384, seed=number)
            counts = np.stack(list(model.batches(batches)))
            if number == 0:
                counts[generator.random(counts.shape) < 0.3] = 0
            name = f"zipf {skew:g}, {'two each' if last else f'1 to {most} each'}"
            yield Group(name, most, placement, counts)
    for loads in real:
        experts = loads.num_experts
        ranks = min(8, experts // 4)
        steps = loads.load_NTE.shape[1] // ranks * ranks
        yield Group(
            "real, two each", 2, two_each(experts, ranks), loads.load_NTE[:, :steps].reshape(-1, ranks, experts)
        )


def measure(batches: int = 40, real: list[RealLoads] | None = None) -> list[dict]:
    """Every group's plans, the same as the reference's, and how long a solve takes.

    Microseconds of the first launch, in which a block's instructions come from memory, and of the next.
    """
    plain = KernelShape.from_config(MoEConfig(512, 256, 8, 2, dtype="bfloat16"), 1)
    solvers: dict[tuple, DeviceSolver] = {}
    every = list(groups(batches, [read_loads(ROOT / "moe_ref" / "assets" / "train_loads.npz"), *(real or [])]))
    rows = []
    for group in every:
        placement, counts = group.placement, group.counts_NPE
        experts, ranks = placement.num_experts, placement.num_ranks
        size = (experts, ranks, group.replicas)
        if size not in solvers:
            # one kernel for the placements of a size: slots for the fullest of them
            same = [g for g in every if (g.placement.num_experts, g.placement.num_ranks, g.replicas) == size]
            slots = max(g.placement.slots for g in same)
            shape = replace(plain, experts=experts, ranks=ranks, replicas=group.replicas, placed_slots=slots)
            solvers[size] = DeviceSolver(shape)
        solver = solvers[size]
        quota, first = solver.plan(counts, placement)
        again, times = solver.plan(counts, placement)
        for batch, got in zip(counts, quota, strict=True):
            want = balance.schedule(batch, placement).quota_PED
            assert np.array_equal(got[..., : want.shape[2]], want), f"{placement}: {batch.tolist()}"
            assert not got[..., want.shape[2] :].any(), "rows for a replica that isn't there"
        assert np.array_equal(again, quota), "two launches differ"
        rows.append(
            {
                "experts": experts,
                "ranks": ranks,
                "loads": group.name,
                "plans": len(counts),
                "median_us": round(float(np.median(times)) / 1e3, 2),
                "worst_us": round(float(times.max()) / 1e3, 2),
                "first_median_us": round(float(np.median(first)) / 1e3, 2),
            }
        )
    return rows


def main(arguments: list[str]) -> None:
    """Write the results file; see the module's docstring."""
    from moe_fast.bench import PACKAGES
    from moe_ref.results import provenance, write_results

    out = Path(arguments[0])
    files = arguments[2:] if arguments[1:2] == ["--loads"] else []
    rows = measure(100, [read_loads(file) for file in files])
    command = f"python tests/gpu/solving.py {out.name}" + "".join(f" --loads {Path(file).name}" for file in files)
    title = "The solver in the kernel: microseconds of a plan"
    description = (
        "One warp on one SM, between the counts and the tiles; every plan equals that of moe_ref.balance. Experts on "
        "random sets of ranks, 16384 rows a rank; real loads: consecutive steps of a layer as the counts of the ranks; "
        "first: of the launch that brings the instructions from memory."
    )
    found = {"title": title, "description": description, **provenance(command, PACKAGES)}
    found |= {"plans": sum(row["plans"] for row in rows), "worst_median_us": max(row["median_us"] for row in rows)}
    write_results(out, {**found, "worst_us": max(row["worst_us"] for row in rows), "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
