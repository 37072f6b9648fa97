"""Checkpoints of a run on many ranks, by logical expert id: any number of ranks and any placement loads them.

    folder/
        owner.lock                       locked while a run writes here
        latest.json                      {"folder": "step-00000020-1a2b3c4d", "step": 20}
        step-00000020-1a2b3c4d/
            rank-0000.safetensors        what rank 0 is responsible for: `KEY:FIELD` -> tensor
            rank-0001.safetensors        ...
            meta.json                    step, optimiser steps, placements, whatever the caller adds

A tensor is a dense parameter or one expert of one parameter, written by the first rank of its replica set; FIELD is
`weight`, `master`, a moment, or `buffer`. Nothing is pickled, and nothing says which rank computed what, so who loads
may have other ranks and another placement.

A checkpoint counts only once `latest.json` names it, and that file is replaced in one step after all ranks have written
theirs to disk. A run killed at any time leaves the checkpoint before, or this one, whole.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_ref.errors import UsageError
from moe_ref.placement import Placement
from moe_ref.train.optimizer import ReplicaOptimizer
from moe_ref.world import DistributedWorld, World

try:
    import fcntl
except ImportError:  # not on this system: nobody is kept out of a folder
    fcntl = None

FORMAT = "moe-ref training checkpoint 1"
LATEST, META, OWNER = "latest.json", "meta.json", "owner.lock"
_NAME = re.compile(r"step-\d{8,}-[0-9a-f]{8}")
KEPT = 2
"""Checkpoints that stay on disk: the newest, and the one before for whoever is still reading it."""


def save(folder: Path, step: int, optimizer: ReplicaOptimizer, extra: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint; every rank of the world calls it, between optimiser steps.

    Args:
        folder: the same for all ranks, on a file system that all see.
        step: of the run.
        extra: further JSON values for `load` to give back.

    Raises:
        UsageError: on every rank, if one of them can't write; the checkpoint before stays.
        TypeError: `extra` has other values.
    """
    training = optimizer.training
    world, rank = training.world, training.world.local_ranks[0]
    more = json.loads(json.dumps(dict(extra or {})))
    name = _agreed_name(optimizer, step)
    target = folder / name
    records = optimizer.export()
    tensors: dict[str, Tensor] = {}
    for bucket in training.buckets:
        if bucket.place == 0:
            for piece in bucket.pieces:
                for field, value in records[piece.key].items():
                    tensors[f"{piece.key}:{field}"] = value.contiguous().cpu()
    if rank == 0:
        for buffer, value in training.module.named_buffers():
            tensors[f"{buffer}:buffer"] = value.detach().contiguous().cpu()

    def write_part() -> None:
        target.mkdir(parents=True, exist_ok=True)
        file = target / f"rank-{rank:04d}.safetensors"
        save_file(tensors, file, metadata={"format": FORMAT})
        _to_disk(file)

    def name_it() -> None:
        if rank != 0:
            return
        meta = {
            "format": FORMAT,
            "step": step,
            "optimizer": type(optimizer.inner).__name__,
            "optimizer_steps": optimizer.steps(),
            "optimizer_scalars": optimizer.scalars(),
            "ranks": world.num_ranks,
            "files": world.num_ranks if isinstance(world, DistributedWorld) else 1,
            "placements": {layer: p.ranks_of_expert for layer, p in training.placements.items()},
            "extra": more,
        }
        _write_json(target / META, meta)
        _write_json(folder / LATEST, {"folder": name, "step": step})

    for part in (write_part, name_it):
        failed = ""
        try:
            part()
        except (OSError, SafetensorError) as error:
            failed = f"rank {rank}: {error}"
        # Whoever failed must say so: the others would wait for it.
        said = [text for text in world.gather_text(failed) if text]
        if said:
            shutil.rmtree(target, ignore_errors=True)  # makes room, should that be what is missing
            raise UsageError(
                f"the checkpoint of step {step} can't be written into {folder} ({said[0]}); make room or name another "
                "folder, and go on from the checkpoint before"
            )
    if rank == 0:
        _forget_old(folder, name)


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json of the latest checkpoint.

    Raises:
        UsageError: there is none, or it is not of this format.
    """
    latest = _read_json(folder / LATEST, "start without --resume, in another folder")
    name = latest.get("folder")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{folder / LATEST} names the folder {str(name)[:80]!r}, expected one inside {folder}")
    path = folder / name / META
    meta = _read_json(path, "the checkpoint is incomplete")
    if meta.get("format") != FORMAT:
        raise UsageError(f"{folder} has the format {meta.get('format')!r}, expected {FORMAT!r}")
    for key, least in (("step", 0), ("optimizer_steps", 0), ("ranks", 1), ("files", 1)):
        value = meta.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{key} in {path} is {value!r}, expected an integer of at least {least}")
    for key in ("placements", "extra"):
        if not isinstance(meta.get(key), dict):
            raise UsageError(f"{key} in {path} is {meta.get(key)!r}, expected an object")
    scalars = meta.setdefault("optimizer_scalars", {})  # older checkpoints have none
    if not isinstance(scalars, dict) or not all(isinstance(value, float) for value in scalars.values()):
        raise UsageError(f"optimizer_scalars in {path} is {scalars!r}, expected numbers by name")
    return {**meta, "path": str(folder / name)}


@contextmanager
def owned(folder: Path, world: World) -> Iterator[None]:
    """While inside, `folder` is this run's alone; every rank calls it. A run that was killed owns nothing any more.

    Two runs would name each other's checkpoints as the latest, and remove what the other is still writing.

    Raises:
        UsageError: on every rank, if another run writes there, or nothing can be written.
    """
    failed, handle = "", None
    if world.local_ranks[0] == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = (folder / OWNER).open("ab")
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            failed = "another run is writing there"
        except OSError as error:
            # Some network file systems know no locks; then nobody is kept out.
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                failed = error.strerror or str(error)
    try:
        said = [text for text in world.gather_text(failed) if text]
        if said:
            raise UsageError(f"checkpoints can't go into the folder {folder}: {said[0]}; name another")
        yield
    finally:
        if handle is not None:
            handle.close()


def saved_placements(meta: Mapping[str, Any]) -> dict[str, Placement]:
    """Placement of every layer at the time of the checkpoint."""
    try:
        return {name: Placement.from_replicas(sets, int(meta["ranks"])) for name, sets in meta["placements"].items()}
    except (TypeError, ValueError) as error:
        raise UsageError(f"a placement of the checkpoint can't be used: {error}") from error


def load(folder: Path, optimizer: ReplicaOptimizer) -> dict[str, Any]:
    """Fill model and optimiser from the latest checkpoint; every rank calls it, whatever wrote it.

    Returns:
        The metadata: `step`, `ranks`, `placements`, `extra`.

    Raises:
        UsageError: no checkpoint, a file is missing or unreadable, or it is of another model or optimiser.
    """
    meta = read_meta(folder)
    wrote, here = meta.get("optimizer"), type(optimizer.inner).__name__
    if wrote not in (None, here):  # older checkpoints don't say it
        raise UsageError(f"the checkpoint was written with the optimiser {wrote}, this run has {here}")
    files = [Path(meta["path"]) / f"rank-{rank:04d}.safetensors" for rank in range(int(meta["files"]))]
    records = _Records(files)
    optimizer.load(records, int(meta["optimizer_steps"]), meta["optimizer_scalars"])
    with torch.no_grad():
        for name, buffer in optimizer.training.module.named_buffers():
            if "buffer" not in records.get(name, {}):
                raise UsageError(f"no buffer {name} in the checkpoint; it was written for another model")
            buffer.copy_(records[name]["buffer"])
    return meta


def full_state_dict(folder: Path) -> dict[str, Tensor]:
    """State dict of the whole model (all experts stacked by their ids), as a model without a world takes it.

    Raises:
        UsageError: as `load`.
    """
    meta = read_meta(folder)
    records = _Records([Path(meta["path"]) / f"rank-{rank:04d}.safetensors" for rank in range(int(meta["files"]))])
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for key, record in records.items():
        name, _, expert = key.rpartition("/")
        value = record["weight"] if "weight" in record else record["buffer"]
        if name:
            experts.setdefault(name, {})[int(expert)] = value
        else:
            state[key] = value
    return state | {name: torch.stack([rows[e] for e in sorted(rows)]) for name, rows in experts.items()}


class _Records(Mapping[str, Mapping[str, Tensor]]):
    """All tensors of a checkpoint by key and field; read from the files when they are asked for."""

    def __init__(self, files: list[Path]) -> None:
        self._fields: dict[str, dict[str, Path]] = {}
        for file in files:
            with _opened(file) as handle:
                names = handle.keys()
                for name in names:
                    key, _, field = name.rpartition(":")
                    self._fields.setdefault(key, {})[field] = file

    def __getitem__(self, key: str) -> Mapping[str, Tensor]:
        return _Fields(key, self._fields[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class _Fields(Mapping[str, Tensor]):
    """The fields of one key."""

    def __init__(self, key: str, file_of: dict[str, Path]) -> None:
        self._key, self._file_of = key, file_of

    def __getitem__(self, field: str) -> Tensor:
        with _opened(self._file_of[field]) as handle:
            return handle.get_tensor(f"{self._key}:{field}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


# --- files --------------------------------------------------------------------------------------------------------


def _agreed_name(optimizer: ReplicaOptimizer, step: int) -> str:
    """Folder name that no other attempt at this step has used, the same on all ranks."""
    world = optimizer.training.world
    name = [f"step-{step:08d}-{uuid.uuid4().hex[:8]}"]
    if isinstance(world, DistributedWorld):
        dist.broadcast_object_list(name, group=world.group, group_src=0)
    return str(name[0])


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} is not a readable part of a checkpoint: {error}") from error


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file in one step: readers see the old one or the new one."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(value) + "\n")
    _to_disk(unfinished)
    unfinished.replace(path)


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"no checkpoint at {path.parent}: {path.name} can't be read ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a {type(value).__name__}, expected an object; {remedy}")
    return value


def _forget_old(folder: Path, newest: str) -> None:
    """Remove all but the newest checkpoints, and what killed runs left behind."""
    ours = [path for path in folder.glob("step-*-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    found = sorted(ours, key=lambda p: (p.name == newest, (p / META).is_file(), p.stat().st_mtime))
    for path in found[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
