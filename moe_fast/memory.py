"""Heap and workspace of one rank's kernel, region by region: where the host finds what the kernel reads and writes."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fast.heap import Heap
from moe_fast.kernel.regions import (
    Region,
    buffer_rows,
    counter_words,
    heap_regions,
    wire_flags,
    wire_words,
    workspace_regions,
)
from moe_fast.kernel.shapes import KernelShape
from moe_ref.errors import UsageError

TRACKS, EVENTS = 5, 512
"""Tracks of a block and events of a track in traced variants: those of `signals.TRACKS` and `signals.EVENTS`."""


def trace_words(blocks: int) -> int:
    """int64 words of the trace: per block and track a header and EVENTS events of three words."""
    return blocks * TRACKS * (EVENTS + 1) * 3


class Memory:
    """A kernel's memory; the workspace is allocated here, zeroed.

    Args:
        shape: the variant.
        heap: symmetric memory of `heap_bytes(shape, max_tokens)` bytes.
        max_tokens: largest S.
        blocks: of the launch.

    Raises:
        UsageError: the heap is too small.
    """

    def __init__(self, shape: KernelShape, heap: Heap, max_tokens: int, blocks: int) -> None:
        self.shape, self.heap, self.max_tokens = shape, heap, max_tokens
        self.in_heap, heap_bytes = heap_regions(shape, max_tokens)
        if heap.size < heap_bytes:
            raise UsageError(
                f"the symmetric heap has {heap.size} bytes, this layer needs {heap_bytes}; lower max_tokens"
            )
        self.in_workspace, size = workspace_regions(shape, max_tokens, blocks)
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=heap.device)
        self.rows = buffer_rows(shape, max_tokens)
        """Rows of one side of the dispatch buffer."""
        self.counter_words = counter_words(shape, max_tokens, blocks)

    def address(self, name: str) -> int:
        """Address of a workspace region."""
        return self.workspace.data_ptr() + self.in_workspace[name].offset

    def symmetric(self, name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        """A region of the heap as a flat tensor."""
        return _view(self.heap.memory, self.in_heap[name], dtype)

    def local(self, name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        """A region of the workspace as a flat tensor."""
        return _view(self.workspace, self.in_workspace[name], dtype)

    @property
    def epoch(self) -> int:
        """Calls that have ended; waits for the device."""
        return int(self.local("control")[0])

    def reset(self) -> None:
        """Zero counters and targets and set the epoch, the same on every rank, as before the first call."""
        for name in ("arrived", "back", "counts", "counts_flag", "wire"):
            self.symmetric(name, torch.uint8).zero_()
        for name in ("plan", "arrived_target", "back_target", "counters", "control"):
            self.local(name, torch.uint8).zero_()

    def poison(self) -> None:
        """Fill every data buffer with NaN: what a call reads must be what it wrote. Between calls only; collective."""
        torch.cuda.synchronize(self.heap.device)
        self.heap.barrier()
        dtype = getattr(torch, self.shape.dtype)
        for data in (
            *(self.symmetric(name, dtype) for name in ("rows", "returned", "results")),
            *((self.symmetric("wire", dtype),) if self.shape.put else ()),
            *(self.local(name, dtype) for name in ("hidden", "shared_hidden", "shared_rows")),
            self.local("weight", torch.float32),
        ):
            data.fill_(float("nan"))
        for integers in (
            self.symmetric("home", torch.uint8),
            *(self.local(name, torch.uint8) for name in _INTEGERS),
        ):
            integers.fill_(0x7F)
        if self.shape.by_token:
            # all but the flags, which hold the number of a call and are looked at before they are written
            flags, words = wire_flags(self.shape, self.max_tokens), wire_words(self.shape, self.max_tokens)
            self.symmetric("wire")[flags:words].fill_(0x7F7F7F7F)
        torch.cuda.synchronize(self.heap.device)
        self.heap.barrier()


_INTEGERS = (
    "expert", "index", "send", "histogram", "tile_slot", "tile_rows", "row_shift", "list_start", "quota_end",
    "list_shift", "tile_at", "where",
)  # fmt: skip
"""Regions of the workspace that every call fills with integers anew."""


def _view(memory: Tensor, region: Region, dtype: torch.dtype) -> Tensor:
    return memory[region.offset : region.offset + region.size].view(dtype)
