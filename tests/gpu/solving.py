"""The kernel's solver alone, one batch of counts per block: for comparing many plans and for timing it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
import numpy as np
import torch
from cutlass import Int32, Int64

from moe_fast.kernel import solver
from moe_fast.kernel.scans import CONSUMERS, sync_consumers
from moe_fast.kernel.shapes import KernelShape, placement_tables
from moe_fast.kernel.signals import gmem, read, write
from moe_ref.placement import Placement


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
        for i in range(thread, pairs + k.ranks * k.slots, CONSUMERS):
            value = read(tables, i)
            if i < pairs:
                m[w.rank + i] = value
            else:
                m[w.held + i - pairs] = value
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
            solver.solve(k, m, thread, solver.WARP)
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
