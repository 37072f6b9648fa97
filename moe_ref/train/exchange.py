"""Sums over replica sets: every rank exchanges with all its neighbours at once.

Two ranks are neighbours if some replica set holds both. All that a rank has for a neighbour, whatever the set, travels
in one message, and all messages of a rank are under way together. No set waits for another, so no order of sets can
deadlock; inside a message the sets stand in the one global order of `buckets`, so both ends agree on what is where.

A sum is taken in replica order by everyone who takes it, "mine first" would give every replica other bits:

    two replicas     both send all and both add: half the steps, the same bytes as any other way
    three or more    the sum is divided: replica j adds up part j, then hands it to the others (reduce-scatter and
                     all-gather)
    sharded          only the first half of that: each replica keeps the part that its optimiser works on (ZeRO-1)

Letters: N numbers of a bucket, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ref.train.buckets import Bucket
from moe_ref.world import DistributedWorld, World, all_gather

Messages = dict[int, list[Tensor]]
"""Per neighbour the tensors for it, in the global order of buckets; or what it sends, by tensors of that kind."""


def swap(world: World, send: Messages, like: Messages) -> Messages:
    """Send and receive everything at once; empty messages are not sent.

    Args:
        send: what each neighbour gets.
        like: for each neighbour tensors of the shapes and dtypes that it sends (their values don't matter).

    Returns:
        What has arrived, as `like`.
    """
    sizes = {peer: [t.numel() * t.element_size() for t in tensors] for peer, tensors in like.items()}
    outgoing = {peer: _bytes(tensors) for peer, tensors in send.items()}
    operations, landed = [], {}
    for peer in sorted(set(send) | set(like)):
        assert isinstance(world, DistributedWorld), "a simulated world has no neighbours"
        where = peer if world.group is None else dist.get_global_rank(world.group, peer)
        if peer in outgoing and outgoing[peer].numel():
            operations.append(dist.P2POp(dist.isend, outgoing[peer], where, world.group))
        if peer in like:
            landed[peer] = torch.empty(sum(sizes[peer]), dtype=torch.uint8, device=like[peer][0].device)
            if landed[peer].numel():
                operations.append(dist.P2POp(dist.irecv, landed[peer], where, world.group))
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
    return {
        peer: [_typed(part, t) for part, t in zip(raw.split(sizes[peer]), like[peer], strict=True)]
        for peer, raw in landed.items()
    }


def _bytes(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors as one run of bytes: bits arrive as they were sent, and gloo knows few dtypes."""
    parts = [t.reshape(-1).view(torch.uint8) for t in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _typed(part: Tensor, like: Tensor) -> Tensor:
    """Bytes as numbers; copied only where a message put 8-byte numbers at an address that is no multiple of 8."""
    if part.storage_offset() % like.element_size():
        part = part.clone()
    return part.view(like.dtype).view(like.shape)


def sum_buckets(world: World, buckets: Sequence[Bucket], mine: Sequence[Tensor], sharded: bool) -> list[Tensor]:
    """Sum every bucket over its replica set.

    Args:
        buckets: of this rank, in the global order.
        mine: this rank's contribution to each, [N], contiguous; may be overwritten.
        sharded: return this rank's part of the sums only.

    Returns:
        Per bucket the sum, [N], or [part] if sharded; bit-identical on all replicas.
    """
    send: Messages = {}
    like: Messages = {}
    for bucket, flat in zip(buckets, mine, strict=True):
        for place, rank in _others(bucket):
            send.setdefault(rank, []).append(flat[_part(bucket, place, sharded)])
            like.setdefault(rank, []).append(flat[_part(bucket, bucket.place, sharded)])
    arrived = {peer: iter(tensors) for peer, tensors in swap(world, send, like).items()}

    sums = []
    for bucket, flat in zip(buckets, mine, strict=True):
        addends = {place: next(arrived[rank]) for place, rank in _others(bucket)}
        addends[bucket.place] = flat[_part(bucket, bucket.place, sharded)]
        total = addends[0]
        for place in range(1, len(bucket.ranks)):
            total += addends[place]
        sums.append(total)
    if sharded:
        return sums
    divided = [i for i, bucket in enumerate(buckets) if len(bucket.ranks) > 2]
    whole = gather_parts(world, [buckets[i] for i in divided], [sums[i] for i in divided])
    for i, value in zip(divided, whole, strict=True):
        sums[i] = value
    return sums


def gather_parts(world: World, buckets: Sequence[Bucket], parts: Sequence[Tensor]) -> list[Tensor]:
    """From every replica's own part of a bucket to the whole bucket on all of them, [N] each."""
    send: Messages = {}
    like: Messages = {}
    whole = [part.new_empty(bucket.size) for bucket, part in zip(buckets, parts, strict=True)]
    for bucket, part, flat in zip(buckets, parts, whole, strict=True):
        flat[bucket.bounds(bucket.place)] = part
        for place, rank in _others(bucket):
            send.setdefault(rank, []).append(part)
            like.setdefault(rank, []).append(flat[bucket.bounds(place)])
    arrived = {peer: iter(tensors) for peer, tensors in swap(world, send, like).items()}
    for bucket, flat in zip(buckets, whole, strict=True):
        for place, rank in _others(bucket):
            flat[bucket.bounds(place)] = next(arrived[rank])
    return whole


def _others(bucket: Bucket) -> list[tuple[int, int]]:
    """(place, rank) of the other replicas."""
    return [(place, rank) for place, rank in enumerate(bucket.ranks) if place != bucket.place]


def _part(bucket: Bucket, place: int, sharded: bool) -> slice:
    """What replica `place` adds up in the first half: its part, or everything if both of two do."""
    in_parts = sharded or len(bucket.ranks) > 2
    return bucket.bounds(place) if in_parts else slice(0, bucket.size)


def sum_everywhere(world: World, value: float, device: torch.device) -> float:
    """Sum of one number over all processes, added in rank order in float64: the same bits everywhere."""
    if not isinstance(world, DistributedWorld) or world.num_ranks == 1:
        return value
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    everyone = mine.new_empty(world.num_ranks)
    all_gather(everyone, mine, world.group)
    return sum(everyone.tolist())
