"""Symmetric memory without a GPU: what it says when NVSHMEM can't give it what the kernel needs."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from moe_fast import heap
from moe_ref.errors import BackendUnavailable, UsageError


@pytest.fixture
def two_ranks(monkeypatch):
    """Rank 0 of two, NVSHMEM started with a heap of 1 MiB; what NVSHMEM does is the test's to say."""
    nvshmem = types.ModuleType("nvshmem.core")
    nvshmem.tensor = lambda shape, dtype: torch.empty(shape, dtype=dtype)
    parent = types.ModuleType("nvshmem")
    parent.core = nvshmem
    monkeypatch.setitem(sys.modules, "nvshmem", parent)
    monkeypatch.setitem(sys.modules, "nvshmem.core", nvshmem)
    monkeypatch.setattr(heap, "start", lambda *arguments: None)
    monkeypatch.setattr(heap, "_started", {"size": 1 << 20})
    monkeypatch.setattr(heap.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(heap.dist, "get_world_size", lambda group=None: 2)
    return nvshmem


def test_a_peer_out_of_reach_is_named(two_ranks):
    def refuse(memory, peer):
        raise RuntimeError("no peer access")

    two_ranks.get_peer_tensor = refuse
    with pytest.raises(UsageError, match=r"rank 0 can't reach the memory of rank 1 directly \(no peer access\)"):
        heap.symmetric_heap(1024, torch.device("cpu"))


def test_a_layer_larger_than_the_heap_is_refused_with_both_numbers(two_ranks):
    with pytest.raises(UsageError, match=r"2097152 bytes.*started with 1048576"):
        heap.symmetric_heap(2 << 20, torch.device("cpu"))


@pytest.mark.parametrize("other", [True, False])
def test_direct_stores_need_every_rank_to_reach_every_other(two_ranks, monkeypatch, other):
    """Put-with-signal is chosen as soon as one rank misses one peer, on all ranks."""

    def gather(box, mine, group):
        box[:] = [mine, other]

    monkeypatch.setattr(heap.dist, "all_gather_object", gather)
    freed = []
    two_ranks.free_tensor = freed.append
    two_ranks.get_peer_tensor = lambda memory, peer: ("view", peer)
    assert heap.all_mapped(torch.device("cpu")) is other
    assert freed[0] == ("view", 1)

    def refuse(memory, peer):
        raise RuntimeError("no peer access")

    two_ranks.get_peer_tensor = refuse
    assert not heap.all_mapped(torch.device("cpu"))


def test_without_mapping_no_peer_has_an_address(two_ranks, monkeypatch):
    """With put-with-signal nothing but this rank's own address is known: a direct store would fail."""
    monkeypatch.setattr(heap.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(heap.dist, "barrier", lambda group: None)
    monkeypatch.setattr(heap, "_heaps", [])
    own = heap.symmetric_heap(1024, torch.device("cpu"), mapped=False)
    assert own.peers.tolist() == [own.base, 0]


def test_an_old_host_library_is_refused():
    with pytest.raises(BackendUnavailable, match=r"3\.4\.5"):
        heap.check_version("3.4.5")
    heap.check_version("3.6.0")


@pytest.mark.parametrize(("host", "device"), [("3.6.5", (3, 8, 0)), ("3.8.0", (4, 0, 0)), ("4.0.1", (3, 8, 0))])
def test_device_code_that_the_host_library_cannot_serve_is_named(host, device):
    """Newer than the host library, or of another major version: both versions and what to do."""
    problem = heap.device_problem(host, device, "the kernel's device code")
    for part in ("the kernel's device code is of NVSHMEM", ".".join(map(str, device)), host, "LD_PRELOAD"):
        assert part in problem


@pytest.mark.parametrize("device", [(3, 8, 0), (3, 8, 2), (3, 6, 5)])
def test_a_host_library_serves_its_own_and_older_device_code(device):
    assert heap.device_problem("3.8.0", device, "it") is None


@pytest.mark.parametrize("late", [0, 1])
def test_a_kernel_of_another_nvshmem_is_refused_on_every_rank(two_ranks, monkeypatch, late):
    """Whichever rank it is; the kernel isn't handed to NVSHMEM."""
    linked = []
    kernel = types.SimpleNamespace(from_handle=lambda handle: handle)
    two_ranks.NvshmemKernelObject, two_ranks.library_init = kernel, linked.append
    two_ranks.get_version = lambda: "3.8.0"
    own = heap.Heap(torch.zeros(16), torch.zeros(2), 0, 2)
    function = types.SimpleNamespace(library=7)

    def gather(box, mine, group):
        box[:] = [mine, None] if late == 0 else [mine, heap.device_problem("3.6.0", (3, 8, 0), "the kernel's")]

    monkeypatch.setattr(heap.dist, "all_gather_object", gather)
    with pytest.raises(BackendUnavailable, match=rf"rank {late}: .*NVSHMEM 3\.[89]\.0"):
        own.link(function, (3, 9, 0) if late == 0 else (3, 8, 0))
    assert not linked
    monkeypatch.setattr(heap.dist, "all_gather_object", lambda box, mine, group: box.__setitem__(slice(0, 1), [mine]))
    own.link(function, (3, 8, 0))
    assert linked == [7] == own.linked
