"""The cost model: what a machine needs for a tile, a message, a launch.

A `Machine` is two dozen numbers, each with its source beside the presets below: measured on 2 x H200 (bf16, CUDA
13.0), fitted to runs recorded there (`moe_ref.runtime.recorded`, `moe_ref.runtime.calibrate`), stated by a data sheet,
or assumed.

How well it fits, mean and largest relative error over the records: a persistent kernel's tiles 3 % and 7 % (5
records), grouped products 7 % and 19 % (27), library chains 8 % and 28 % (27); the largest stand at 1024 tokens per
rank. The fit is to these records themselves; no run was kept apart, and nothing but h200-2 was measured at all. On runs
that were kept apart, of the finished megakernel: `python -m moe_fast.bench predict` and the lab notes.

Letters: P ranks, H hidden, D intermediate, T tile rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from moe_ref.errors import UsageError
from moe_ref.layout import ceil_div
from moe_ref.runtime.tasks import Combine, TileShape


@dataclass(frozen=True)
class Machine:
    """Parameters of one machine; times in microseconds, rates per second and GPU.

    Attributes:
        name: of the preset.
        gpus: ranks that it has; gpus_per_node: of them share one NVLink domain.
        sms: streaming multiprocessors; the megakernel's OS block takes one, the others are processors.
        flops_16: sustained FLOP/s of full 128 x 256 tiles in bf16 or fp16, all SMs together.
        flops_32: the same in fp32 inputs (TF32 tensor cores).
        memory_bytes_per_s: device memory, read plus write. memory_bytes: its size. sm_bytes_per_s: what one SM can take
            in from the L2 cache.
        link_bytes_per_s, link_us: NVLink, one direction, payload of peer stores; latency of a put with its signal.
        nic_bytes_per_s, nic_us: the same between nodes, per GPU.
        copy_bytes_per_s: rows that the auxiliary warps copy inside the GPU.
        tile_us: what a tile costs beyond its arithmetic: pipeline fill and the exposed part of the epilogue.
        exposed: of a tile's arithmetic and its weights' way from memory, the share of the shorter that shows.
        remote_us: extra time of a GEMM1 tile whose rows all go to peers: remote stores drain more slowly, and traffic
            and tiles share the memory system.
        scheduler_us, scheduler_task_us: from "ready and idle" to the mail being read; and between two mails.
        subscriber_us, subscriber_task_us: from a signal to "ready"; and between two of them.
        mailbox: mails that a processor holds, the running task included.
        gate_us, plan_us: fixed part of the gate (softmax, top-k, counting); offsets from the counts.
        launch_us: from the host's call to the first instruction, paid once per megakernel.
        issue_us: host time to issue one operation of a multi-kernel chain; the host runs ahead of the device until it
            must wait for it. gap_us: the device between two dependent operations: drain, launch, refill.
        product_us: fixed time of a library's grouped product.
        sync_us: between ranks, the host reads the sizes of the exchange back from the device and prepares it.
        collective_us, collective_bytes_per_s: a library's all-to-all: fixed time, and payload rate in one direction.
        pass_bytes_per_s: elementwise, sort and scatter passes of a chain of library operations, read plus written.
        chain_flops_share: rate of a library's grouped GEMM, as a share of flops_16 or flops_32.
        communication_sms: SMs that carry data while a chunked overlap computes on the others.
    """

    name: str
    gpus: int
    gpus_per_node: int
    sms: int
    flops_16: float
    flops_32: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    sm_bytes_per_s: float = 1.0e11
    link_us: float = 2.0
    nic_bytes_per_s: float = 45e9
    nic_us: float = 6.0
    copy_bytes_per_s: float = 1.0e12
    tile_us: float = 1.0
    exposed: float = 0.3
    remote_us: float = 5.0
    scheduler_us: float = 1.0
    scheduler_task_us: float = 0.02
    subscriber_us: float = 1.0
    subscriber_task_us: float = 0.02
    mailbox: int = 2
    gate_us: float = 8.0
    plan_us: float = 3.0
    launch_us: float = 5.0
    issue_us: float = 20.0
    gap_us: float = 3.0
    product_us: float = 20.0
    sync_us: float = 30.0
    collective_us: float = 40.0
    collective_bytes_per_s: float = 250e9
    pass_bytes_per_s: float = 1.0e12
    chain_flops_share: float = 0.9
    communication_sms: int = 20

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "name":
                continue
            may_be_zero = f.name.endswith("_us")
            if not np.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                raise ValueError(f"{f.name} of machine {self.name} is {value}, expected a finite number above 0")
        if self.sms < 2:
            raise ValueError(f"sms of machine {self.name} is {self.sms}; one processor and the OS block need 2")

    @property
    def processors(self) -> int:
        """Blocks that compute: all SMs but the OS block's."""
        return self.sms - 1

    def flops(self, element_size: int) -> float:
        """Sustained FLOP/s for elements of this size."""
        return self.flops_16 if element_size <= 2 else self.flops_32

    def same_node(self, a: int, b: int) -> bool:
        """Whether two ranks share an NVLink domain."""
        return a // self.gpus_per_node == b // self.gpus_per_node

    def gate_time(self, tokens: int, experts: int, shape: TileShape) -> float:
        """Router product, softmax, top-k and counting of one rank, spread over all SMs; us."""
        flops = 2 * tokens * shape.hidden * experts
        moved = tokens * shape.row_bytes
        return self.gate_us + 1e6 * max(flops / self.flops(shape.element_size), moved / self.memory_bytes_per_s)

    def gemm_time(
        self,
        shape: TileShape,
        inner: int,
        row_tiles_of_expert: float,
        overhead_us: float,
        flops_share: float = 1.0,
        rows: int | None = None,
        tasks: int | None = None,
    ) -> float:
        """One T x tile_columns tile with inner length H (GEMM0) or D (GEMM1); us.

        Arithmetic at the SM's share of the rate, and the weights' way from memory at the SM's share of the bandwidth;
        the longer one counts, and the exposed share of the other. Row tiles of one expert run at about the same time,
        so its weights are read from memory once and from the L2 cache by the others.

        rows: of the tile that are no padding, by default all; a half of the tile that is all padding is not computed.
        tasks: of this kind that run with it or after it on the rank; those of a wave share the bandwidth, as far as an
        SM can take it, and waves are taken as equally full.
        """
        halves = 2 if rows is None or 2 * rows > shape.tile_rows else 1
        flops = shape.tile_rows * halves * inner * shape.tile_columns
        weights = inner * shape.tile_columns * shape.element_size / row_tiles_of_expert
        arithmetic = self.sms * flops / (self.flops(shape.element_size) * flops_share)
        sharing = self.sms if tasks is None else tasks / ceil_div(tasks, self.sms)
        loading = weights * max(sharing / self.memory_bytes_per_s, 1 / self.sm_bytes_per_s)
        longer, shorter = max(arithmetic, loading), min(arithmetic, loading)
        return overhead_us + 1e6 * (longer + self.exposed * shorter)

    def combine_time(self, task: Combine, shape: TileShape) -> float:
        """Duration of a Combine task: bound by memory; us."""
        return self.tile_us + 1e6 * self.sms * task.cost(shape).memory_bytes / self.memory_bytes_per_s

    def replace(self, **changes: Any) -> Machine:
        """A copy with some parameters changed, checked again."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Noise:
    """What real machines add. All of it is drawn from the seed.

    Attributes:
        jitter: relative spread (log-normal sigma) of the duration of every task, put and operation.
        launch_jitter_us: ranks start up to this much apart.
        straggler: rank whose tasks take `slowdown` times as long; -1 for none.
        seed: of the generator.
    """

    jitter: float = 0.0
    launch_jitter_us: float = 0.0
    straggler: int = -1
    slowdown: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 2:
            raise ValueError(f"jitter is {self.jitter}, expected 0 (none) to 2 (a factor of 7 is common)")
        if self.launch_jitter_us < 0 or self.slowdown < 1:
            raise ValueError("launch_jitter_us must be at least 0 and slowdown at least 1")

    def speed(self, rank: int) -> float:
        """Factor on the durations of a rank."""
        return self.slowdown if rank == self.straggler else 1.0

    def factors(self, stream: int, count: int) -> list[float]:
        """`count` jitter factors with median 1; ones if there is no jitter."""
        if self.jitter == 0:
            return [1.0] * count
        return np.random.default_rng((self.seed, stream)).lognormal(0.0, self.jitter, count).tolist()

    def starts(self, ranks: int) -> list[float]:
        """Start of each rank after the first one; us."""
        if self.launch_jitter_us == 0:
            return [0.0] * ranks
        return np.random.default_rng((self.seed, 7)).uniform(0, self.launch_jitter_us, ranks).tolist()


# --- presets -------------------------------------------------------------------------------------------------------

_H200 = Machine(
    name="h200-2",
    gpus=2,
    gpus_per_node=8,
    sms=132,
    # Fitted (moe_ref.runtime.calibrate on moe_ref.runtime.recorded.H200).
    flops_16=843e12,
    exposed=0.272,
    remote_us=9.30,
    chain_flops_share=0.864,
    product_us=37.4,
    issue_us=22.3,
    pass_bytes_per_s=1.264e12,
    sync_us=646.0,
    # 64 bytes a clock at about 1.6 GHz under load.
    sm_bytes_per_s=1.0e11,
    # Data sheet: TF32 runs at half the bf16 rate.
    flops_32=421.5e12,
    memory_bytes=141e9,
    # Measured: device copies read and write 4.3 TB/s together; put-with-signal 300 GB/s each way at once; a scheduler
    # round with relaxed accesses 0.8-1.2 us for up to 64 mails; a system fence 2-3 us; an exposed epilogue of 4-5 % of
    # a tile of 22 us.
    memory_bytes_per_s=4.3e12,
    link_bytes_per_s=300e9,
    collective_bytes_per_s=300e9,
    scheduler_us=1.0,
    scheduler_task_us=0.016,
    link_us=2.5,
    tile_us=1.0,
    # Assumed, each small against what it stands beside: a subscriber polls as fast as the scheduler; a mail in advance
    # (prefetch depth 1); rows copied inside the GPU at a quarter of the copy rate (a few warps per SM); gate and
    # offsets in a few memory round trips; a launch; the device between two operations; a collective's fixed time.
    subscriber_us=1.0,
    subscriber_task_us=0.016,
    mailbox=2,
    copy_bytes_per_s=1.0e12,
    gate_us=8.0,
    plan_us=3.0,
    launch_us=5.0,
    gap_us=3.0,
    collective_us=30.0,
    communication_sms=20,
    # Data sheet: 400 Gb/s InfiniBand per GPU, 90 % of it as payload; a few microseconds across one switch.
    nic_bytes_per_s=45e9,
    nic_us=6.0,
)

# The H100 is the same die: 132 SMs, 989 TFLOP/s of bf16 and 18 NVLinks, but 3.35 TB/s of memory instead of 4.8.
_H100 = {"memory_bytes_per_s": 4.3e12 * 3.35 / 4.8, "memory_bytes": 80e9}

# The A100 by its data sheet, at the H200's measured efficiency: 312 of 989 TFLOP/s, 2.04 of 4.8 TB/s, 12 of 18 NVLinks
# of the same speed, 200 Gb/s InfiniBand.
_A100 = {
    "sms": 108,
    "flops_16": 843e12 * 312 / 989,
    "flops_32": 421.5e12 * 312 / 989,
    "memory_bytes_per_s": 4.3e12 * 2.04 / 4.8,
    "memory_bytes": 80e9,
    "link_bytes_per_s": 200e9,
    "collective_bytes_per_s": 200e9,
    "pass_bytes_per_s": 1.264e12 * 2.04 / 4.8,
    "copy_bytes_per_s": 1.0e12 * 2.04 / 4.8,
    "nic_bytes_per_s": 22.5e9,
}

PRESETS: dict[str, Machine] = {
    "h200-2": _H200,
    "h200-8": _H200.replace(name="h200-8", gpus=8),
    "h100-8": _H200.replace(name="h100-8", gpus=8, **_H100),
    "h100-8x8": _H200.replace(name="h100-8x8", gpus=64, **_H100),
    "h100-8x64": _H200.replace(name="h100-8x64", gpus=512, **_H100),
    "a100-8": _H200.replace(name="a100-8", gpus=8, **_A100),
}
"""Machines by name. Only h200-2 was measured; the others are scaled from it by data sheets, as said above."""


def machine(name: str) -> Machine:
    """The preset of this name.

    Raises:
        UsageError: there is none; the message lists them.
    """
    if name not in PRESETS:
        raise UsageError(f"machine {name!r} is not known; presets: {', '.join(PRESETS)}")
    return PRESETS[name]
