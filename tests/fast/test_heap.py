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
