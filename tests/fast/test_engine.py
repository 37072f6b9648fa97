"""What the megakernel's host side refuses before it launches anything; no GPU is needed to be told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_fast.backend import FusedBackend
from moe_fast.engine import Engine
from moe_fast.heap import Heap
from moe_fast.kernel.shapes import KernelShape, heap_regions
from moe_ref import MoEConfig
from moe_ref.errors import UsageError

SHAPE = KernelShape.from_config(MoEConfig(hidden=128, intermediate=64, experts=4, top_k=2, dtype="bfloat16"), 1)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a capability that the test chooses, as far as torch's host side tells."""

    def of(major: int, minor: int, name: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))

    return of


def heap_of(size: int) -> Heap:
    return Heap(torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(("major", "minor", "name"), [(8, 0, "NVIDIA A100"), (10, 0, "NVIDIA B200")])
def test_another_gpu_is_refused(gpu, major, minor, name) -> None:
    gpu(major, minor, name)
    says = f"{name} has compute capability {major}.{minor}.* needs 9.0"
    with pytest.raises(UsageError, match=says):
        Engine(SHAPE, heap_of(1024), 64)
    reason = FusedBackend().unavailable()
    assert reason is not None
    assert reason.startswith(f"{name} has compute capability {major}.{minor}")


def test_a_heap_that_is_too_small_is_refused(gpu) -> None:
    gpu(9, 0, "NVIDIA H200")
    need = heap_regions(SHAPE, 64)[1]
    with pytest.raises(UsageError, match=rf"the symmetric heap has {need - 1} bytes, this layer needs {need}"):
        Engine(SHAPE, heap_of(need - 1), 64)
