"""One layer's kernel with its buffers: what a call needs, allocated once.

The engine knows addresses and sizes, not layers: `moe_fast.launching` maps a `MoELayer` onto it.

Letters: S tokens of a rank, H hidden, D intermediate, E experts, K choices, P ranks, R rows of the dispatch buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moe_fast import compiler
from moe_fast.blocks import LEAST_BLOCKS, blocks_per_rank, whole_pairs
from moe_fast.buffers import Buffers, Readback
from moe_fast.call import Call, current_stream
from moe_fast.failures import ErrorRecord
from moe_fast.heap import Heap
from moe_fast.kernel.regions import placement_tables
from moe_fast.kernel.shapes import KernelShape
from moe_fast.memory import Memory, trace_words
from moe_ref.errors import UsageError
from moe_ref.layout import ceil_div
from moe_ref.placement import Placement

DEADLINE_S = 10.0
"""Default deadline of every wait inside the kernel."""


class Engine:
    """Compiled kernel, symmetric heap, workspace. For one thread at a time: calls share arguments and buffers.

    Attributes:
        memory: heap and workspace by region; readback: what calls left there.
        errors: what the kernel reported. trace: events of a traced variant, see `moe_fast.timeline`.
        calls: launches so far. last_values: what `enqueue` got last.

    Args:
        shape: the variant.
        heap: symmetric memory of `heap_bytes(shape, max_tokens)` bytes.
        max_tokens: largest S.
        deadline_s: of every wait in the kernel.
        blocks: of the launch, which are all on the GPU at one time; by default all SMs, or this rank's share of them
            where several ranks' heaps are on one GPU. No result depends on it.

    Raises:
        UsageError: the device isn't a Hopper GPU, the heap is too small, there are too few blocks, or the ranks of one
            GPU were to put with signals.
    """

    def __init__(
        self,
        shape: KernelShape,
        heap: Heap,
        max_tokens: int,
        deadline_s: float = DEADLINE_S,
        blocks: int | None = None,
    ) -> None:
        self.shape, self.heap, self.max_tokens = shape, heap, max_tokens
        self.deadline_s = deadline_s
        device = heap.device
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) != (9, 0):
            raise UsageError(
                f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; the megakernel uses "
                "wgmma and TMA and needs 9.0 (H100, H200)"
            )
        if shape.put and heap.on_one_gpu:
            raise UsageError('transport="put_signal" is between GPUs; ranks on one GPU store into each other: "stores"')
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.blocks = blocks_per_rank(multiprocessors, heap.ranks if heap.on_one_gpu else 1, shape.scheduler)
        if blocks is not None:
            if not LEAST_BLOCKS[shape.scheduler] <= blocks <= self.blocks:
                raise UsageError(
                    f"{blocks} blocks were asked for, expected {LEAST_BLOCKS[shape.scheduler]} to {self.blocks} with "
                    f"scheduler={shape.scheduler!r}"
                )
            self.blocks = blocks
        if shape.paired:
            self.blocks = whole_pairs(self.blocks, shape.scheduler)
        self.memory = Memory(shape, heap, max_tokens, self.blocks)
        self.readback = Readback(self.memory)
        self.errors = ErrorRecord()
        # one call's events: read_timeline clears them, so trace one call at a time
        self.trace = torch.zeros(trace_words(self.blocks) if shape.trace else 16, dtype=torch.int64, device=device)
        self.calls = 0
        self._tables: dict[Placement, Tensor] = {}
        self._last_tables: tuple[Placement, Tensor] | None = None
        self._spare, self._device = self.memory.workspace.data_ptr(), device
        self._placed, self._drops = shape.placed, shape.drops
        self.last_values: tuple[int, ...] = ()
        self.function = compiler.load(shape)
        if shape.put and heap.ranks > 1:
            heap.link(self.function, compiler.nvshmem_of(shape))
        self._call = Call(self.function, self._fixed_arguments())

    def _fixed_arguments(self) -> dict[str, int]:
        memory = self.memory
        at = {f"{name}_at": region.offset for name, region in memory.in_heap.items()}
        names = (
            "expert weight index send histogram row_shift list_start plan tile_slot tile_rows arrived_target "
            "back_target counters control hidden shared_hidden shared_rows quota_end list_shift tile_at where"
        )
        at |= {name: memory.address(name) for name in names.split()}
        return at | {
            "grid": self.blocks,
            "peers": self.heap.peers.data_ptr(),
            "heap": self.heap.base,
            "record": self.errors.address,
            "trace": self.trace.data_ptr(),
            "max_tokens": self.max_tokens,
            "rows": memory.rows,
            "rank": self.heap.rank,
            "counter_words": memory.counter_words,
            "token_tiles": ceil_div(max(self.max_tokens, 1), 32),
            "slot_capacity": self.shape.slot_capacity(self.max_tokens),
        }

    def launch(
        self,
        x_SH: Tensor,
        router_EH: Tensor,
        first_XUH: Tensor,
        second_XHD: Tensor,
        *,
        selection_bias_E: Tensor | None = None,
        router_bias_E: Tensor | None = None,
        first_bias_XU: Tensor | None = None,
        second_bias_XH: Tensor | None = None,
        shared_first_VH: Tensor | None = None,
        shared_second_HW: Tensor | None = None,
        shared_gate_1H: Tensor | None = None,
        expert_SK: Tensor | None = None,
        weight_SK: Tensor | None = None,
        placement: Placement | None = None,
        quota_PED: Tensor | None = None,
        out: Tensor | None = None,
        together: list[Callable[[int], None]] | None = None,
    ) -> Tensor:
        """Enqueue one forward on the current stream; one kernel, nothing else. Returns y [S, H].

        x_SH is read until the call has ended: products take rows that stay on this rank from where the tokens lie.
        All tensors are contiguous and of the shape's dtype, but selection_bias fp32, and a router of fp32 (that of a
        float32 layer, too) as `router_parts` makes it. Biases and the shared expert's weights (of width W) are for
        shapes that have them. expert_SK int64 and weight_SK fp32 hand the routing in. placement: which slot holds what,
        for shapes with replicas; its first launch copies its tables to the device. quota_PED: int32 on the device, the
        same on every rank: a plan instead of the kernel's own; it must stay as it is until the call has ended.
        together: instead of enqueuing the kernel append a function that does it, given a stream's handle: of ranks on
        one GPU none may be launched before all can be, see `local_ranks.side_by_side`.

        Raises:
            UsageError: S over max_tokens, or a placement or plan that isn't of the shape's sizes.
            MegakernelError: an earlier call failed.
        """
        self.errors.raise_if_failed(self.deadline_s)
        tokens = x_SH.size(0)
        if tokens > self.max_tokens:
            raise UsageError(f"S is {tokens} tokens, but the buffers were sized for max_tokens={self.max_tokens}")
        y_SH = torch.empty_like(x_SH) if out is None else out
        at, planned, quota = 0, 0, 0
        if self._placed or placement is not None or quota_PED is not None:
            at, planned, quota = self._replica_arguments(placement, quota_PED)
        spare = self._spare
        values = (
            x_SH.data_ptr() if tokens else spare,
            y_SH.data_ptr() if tokens else spare,
            tokens,
            0 if expert_SK is None else 1,
            spare if expert_SK is None else expert_SK.data_ptr(),
            spare if weight_SK is None else weight_SK.data_ptr(),
            router_EH.data_ptr(),
            # a rank without experts describes memory that nothing will read
            first_XUH.data_ptr() or spare,
            second_XHD.data_ptr() or spare,
            first_XUH.size(0) or 1,
            spare if selection_bias_E is None else selection_bias_E.data_ptr(),
            spare if router_bias_E is None else router_bias_E.data_ptr(),
            spare if first_bias_XU is None else first_bias_XU.data_ptr(),
            spare if second_bias_XH is None else second_bias_XH.data_ptr(),
            spare if shared_first_VH is None else shared_first_VH.data_ptr(),
            spare if shared_second_HW is None else shared_second_HW.data_ptr(),
            spare if shared_gate_1H is None else shared_gate_1H.data_ptr(),
            int(self.deadline_s * 1e9),
            at,
            planned,
            quota,
            self.shape.capacity(tokens) if self._drops else 0,
        )
        if together is None:
            self.enqueue(current_stream(self._device), values)
        else:
            tensors = (
                x_SH, router_EH, first_XUH, second_XHD, selection_bias_E, router_bias_E, first_bias_XU, second_bias_XH,
                shared_first_VH, shared_second_HW, shared_gate_1H, expert_SK, weight_SK, quota_PED,
            )  # fmt: skip
            together.append(partial(self._start, tensors, values))
        return y_SH

    def _start(self, _tensors: tuple[Tensor | None, ...], values: tuple[int, ...], stream: int) -> None:
        """Enqueue the kernel, whose tensors nobody may free and allocate anew before."""
        self.enqueue(stream, values)

    def enqueue(self, stream: int, values: tuple[int, ...]) -> None:
        """Enqueue the kernel on a stream, with the values that `launch` makes of its arguments: x, y and S first."""
        self._call(stream, values)
        self.calls += 1
        self.last_values = values

    def tables(self, placement: Placement) -> Tensor:
        """The kernel's tables of a placement on the device, int32: rank [E, D], then what each slot holds, [P, X]."""
        if self._last_tables is not None and self._last_tables[0] is placement:
            return self._last_tables[1]
        shape = self.shape
        if placement not in self._tables:
            sizes = (placement.num_experts, placement.num_ranks)
            if sizes != (shape.experts, shape.ranks):
                raise UsageError(
                    f"the placement is for {sizes[0]} experts on {sizes[1]} ranks, the kernel for {shape.experts} on "
                    f"{shape.ranks}"
                )
            if placement.max_replicas > shape.replicas or placement.slots > shape.slots:
                raise UsageError(
                    f"the placement has up to {placement.max_replicas} replicas and {placement.slots} slots, the "
                    f"kernel was compiled for {shape.replicas} and {shape.slots}"
                )
            # kept for good: a captured graph may read them, and they are small
            flat = placement_tables(placement, shape.replicas, shape.slots)
            self._tables[placement] = torch.from_numpy(flat).to(self.heap.device)
        # a placement's hash goes through all experts
        self._last_tables = (placement, self._tables[placement])
        return self._last_tables[1]

    def _replica_arguments(self, placement: Placement | None, quota_PED: Tensor | None) -> tuple[int, int, int]:
        """Arguments of a launch that only shapes with replicas have: address of the tables, whether there is a plan,
        its address."""
        shape = self.shape
        if not shape.placed:
            raise UsageError(
                "this kernel was compiled for experts in blocks; a placement or a plan needs a KernelShape that "
                "from_config made for that placement"
            )
        if placement is None:
            raise UsageError("a kernel with replicas needs placement=..., which rank and slot holds which expert")
        at = self.tables(placement).data_ptr()
        if quota_PED is None:
            return at, 0, 0
        want = (shape.ranks, shape.experts, shape.replicas)
        if tuple(quota_PED.shape) != want or quota_PED.dtype != torch.int32 or not quota_PED.is_contiguous():
            raise UsageError(
                f"quota_PED is {quota_PED.dtype} {list(quota_PED.shape)}, expected contiguous int32 {list(want)}"
            )
        return at, 1, quota_PED.data_ptr()

    def buffers(self, tokens: int) -> Buffers:
        """Views of what the last call of S = `tokens` left behind; waits for the device."""
        return self.readback.buffers(tokens)

    def check(self) -> None:
        """Wait for the current stream, then raise what the kernel reported.

        Raises:
            MegakernelTimeout, MegakernelInputError: see `ErrorRecord.raise_if_failed`.
        """
        torch.cuda.current_stream(self.heap.device).synchronize()
        self.errors.raise_if_failed(self.deadline_s)

    def recover(self) -> None:
        """Make the next call possible after a timeout; collective: every rank must call it, for all counters and
        targets are zeroed between two barriers."""
        torch.cuda.synchronize(self.heap.device)
        self.heap.barrier()
        self.memory.reset()
        self.errors.clear()
        torch.cuda.synchronize(self.heap.device)
        self.heap.barrier()

    def poison(self) -> None:
        """See `Memory.poison`."""
        self.memory.poison()
