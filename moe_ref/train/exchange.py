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
"""Per neighbour the tensors to send or to fill, contiguous, in the global order of buckets."""


def swap(world: World, send: Messages, receive: Messages) -> None:
    """Send and receive everything; `receive`'s tensors are filled. Empty messages are not sent."""
    sizes = {peer: sum(t.numel() * t.element_size() for t in tensors) for peer, tensors in receive.items()}
    outgoing = {peer: _bytes(tensors) for peer, tensors in send.items()}
    operations, landed = [], {}
    if not any(sizes.values()) and not any(value.numel() for value in outgoing.values()):
        return
    assert isinstance(world, DistributedWorld)
    for peer in sorted(set(send) | set(receive)):
        where = peer if world.group is None else dist.get_global_rank(world.group, peer)
        if peer in outgoing and outgoing[peer].numel():
            operations.append(dist.P2POp(dist.isend, outgoing[peer], where, world.group))
        if sizes.get(peer):
            like = receive[peer][0]
            landed[peer] = torch.empty(sizes[peer], dtype=torch.uint8, device=like.device)
            operations.append(dist.P2POp(dist.irecv, landed[peer], where, world.group))
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    for peer, raw in landed.items():
        parts = raw.split([t.numel() * t.element_size() for t in receive[peer]])
        for target, part in zip(receive[peer], parts, strict=True):
            # A message may put 8-byte numbers behind 4-byte ones: copy the bytes, a view would need alignment.
            target.view(-1).view(torch.uint8).copy_(part)


def _bytes(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors as one run of bytes: bits arrive as they were sent, and gloo knows few dtypes."""
    parts = [t.reshape(-1).view(torch.uint8) for t in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def sum_buckets(world: World, buckets: Sequence[Bucket], mine: Sequence[Tensor], sharded: bool) -> list[Tensor]:
    """Sum every bucket over its replica set.

    Args:
        buckets: of this rank, in the global order.
        mine: this rank's contribution to each, [N], contiguous.
        sharded: return this rank's part of the sums only.

    Returns:
        Per bucket the sum, [N], or [part] if sharded; bit-identical on all replicas.
    """
    send: Messages = {}
    receive: Messages = {}
    others: list[dict[int, Tensor]] = []
    for bucket, flat in zip(buckets, mine, strict=True):
        own = bucket.bounds(bucket.place) if _in_parts(bucket, sharded) else slice(0, bucket.size)
        arriving = {}
        for place, rank in enumerate(bucket.ranks):
            if place == bucket.place:
                continue
            part = bucket.bounds(place) if _in_parts(bucket, sharded) else slice(0, bucket.size)
            send.setdefault(rank, []).append(flat[part])
            arriving[place] = torch.empty_like(flat[own])
            receive.setdefault(rank, []).append(arriving[place])
        others.append(arriving)
    swap(world, send, receive)

    sums = []
    for bucket, flat, arrived in zip(buckets, mine, others, strict=True):
        if len(bucket.ranks) == 1:
            sums.append(flat)
            continue
        arrived[bucket.place] = flat[bucket.bounds(bucket.place)] if _in_parts(bucket, sharded) else flat
        total = arrived[0].clone()
        for place in range(1, len(bucket.ranks)):
            total += arrived[place]
        sums.append(total)
    if sharded:
        return sums
    divided = [i for i, bucket in enumerate(buckets) if _in_parts(bucket, sharded)]
    whole = gather_parts(world, [buckets[i] for i in divided], [sums[i] for i in divided])
    for i, value in zip(divided, whole, strict=True):
        sums[i] = value
    return sums


def gather_parts(world: World, buckets: Sequence[Bucket], parts: Sequence[Tensor]) -> list[Tensor]:
    """From every replica's own part of a bucket to the whole bucket on all of them, [N] each."""
    send: Messages = {}
    receive: Messages = {}
    whole = []
    for bucket, part in zip(buckets, parts, strict=True):
        if len(bucket.ranks) == 1:
            whole.append(part)
            continue
        flat = part.new_empty(bucket.size)
        flat[bucket.bounds(bucket.place)] = part
        for place, rank in enumerate(bucket.ranks):
            if place != bucket.place:
                send.setdefault(rank, []).append(part)
                receive.setdefault(rank, []).append(flat[bucket.bounds(place)])
        whole.append(flat)
    swap(world, send, receive)
    return whole


def sum_everywhere(world: World, value: float, device: torch.device) -> float:
    """Sum of one number over all processes, added in rank order in float64: the same bits everywhere."""
    if not isinstance(world, DistributedWorld) or world.num_ranks == 1:
        return value
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    everyone = mine.new_empty(world.num_ranks)
    all_gather(everyone, mine, world.group)
    return sum(everyone.tolist())


def _in_parts(bucket: Bucket, sharded: bool) -> bool:
    return len(bucket.ranks) > 1 and (sharded or len(bucket.ranks) > 2)
