"""What a training run needs before it starts: sizes that fit, its text, and the checkpoint that it goes on from.

All of it can be refused here, in one place and before any rank is started.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from moe_ref import backends, text
from moe_ref.environment import local_world_size_from_environment, world_size_from_environment
from moe_ref.errors import UsageError
from moe_ref.layout import ceil_div
from moe_ref.limits import check_memory
from moe_ref.train import sharded
from moe_ref.train.balancing import check_sizes
from moe_ref.train.pretrain import Corpus
from moe_ref.train.settings import TrainJob


def check(job: TrainJob, ranks: int) -> tuple[Corpus, dict[str, Any] | None]:
    """What a run needs from outside: its text, and the checkpoint that it goes on from.

    Raises:
        UsageError: see `train`; this is all that can be refused before any rank is started.
    """
    check_sizes(job.balancing, ranks, job.experts, job.replicas, job.group_size)
    _ = job.model  # raises if the sizes make no model
    processes = local_world_size_from_environment() if world_size_from_environment() else ranks
    check_memory(
        _least_bytes(job, processes),
        f"{processes} processes with a model of these sizes",
        "lower --ranks, --sequences, --context, --experts, --blocks or the widths",
    )
    backend = backends.get(job.backend).unavailable()
    if backend is not None:
        raise backends.BackendUnavailable(f"backend {job.backend!r} can't run here: {backend}")
    meta = sharded.read_meta(Path(str(job.folder))) if job.resume else None
    corpus = _corpus(job)
    if meta is not None:
        _check_same_run(job, meta, corpus)
    elif job.folder is not None and (Path(job.folder) / sharded.LATEST).exists():
        raise UsageError(
            f"{job.folder} has checkpoints of another run, which this one would replace; go on from them with "
            "--resume, or name another folder"
        )
    return corpus, meta


PROCESS_BYTES = 100e6
"""What a process with torch takes before it does anything, roughly and at least."""


def _least_bytes(job: TrainJob, processes: int) -> int:
    """Bytes that the processes of one machine need at least: each makes the whole model before it keeps its share."""
    expert = 3 * job.hidden * job.intermediate * job.experts
    parameters = 2 * 256 * job.hidden + job.blocks * 4 * job.hidden**2 + (job.blocks - 1) * expert
    tokens = job.sequences * job.context
    activations = 8 * tokens + 4 * ceil_div(tokens, job.micro_batches) * 256  # the batch, and one part's logits
    return int(processes * (PROCESS_BYTES + 4 * parameters) + activations)


def _corpus(job: TrainJob) -> Corpus:
    """The text to train on, the end of it held out."""
    sources = {"prose": text.prose, "code": text.code, "excerpt": text.excerpt}
    data = sources[job.text]() if job.text in sources else text.load_text(job.text, _file_bytes(job.text)).data
    corpus = Corpus.of(job.text, data)
    if len(corpus.train) <= job.context + 1:
        raise UsageError(
            f"{job.text} has {len(data)} bytes, expected more than the context of {job.context} to draw from"
        )
    return corpus


MAX_TEXT_BYTES = 64 << 20
"""Of a longer file the beginning: every rank holds the text, and no run of this size reads more."""


def _file_bytes(name: str) -> int:
    path = Path(name)
    return min(path.stat().st_size, MAX_TEXT_BYTES) if path.is_file() else 1  # anything else is load_text's to refuse


_FIXED = (
    "sequences",
    "context",
    "hidden",
    "intermediate",
    "experts",
    "top_k",
    "blocks",
    "seed",
    "text",
    "learning_rate",
    "clip",
    "balance",
    "z",
    "dtype",
)
"""What must be the same for a run to go on as if it had not stopped; ranks, replicas and balancing may change."""


def digest(corpus: Corpus) -> str:
    """SHA-256 of the bytes that are trained on."""
    return hashlib.sha256(corpus.train.numpy().tobytes()).hexdigest()


def _check_same_run(job: TrainJob, meta: dict[str, Any], corpus: Corpus) -> None:
    said = meta["extra"].get("job")
    if not isinstance(said, dict):
        raise UsageError(
            f"the checkpoint in {job.folder} is not one of moe-ref train; start without --resume elsewhere"
        )
    before = {"dtype": "float32", **said}  # older checkpoints knew no other
    for name in _FIXED:
        if before.get(name) != getattr(job, name):
            raise UsageError(
                f"the checkpoint is of a run with {name} {before.get(name)!r}, this one has {getattr(job, name)!r}; "
                "give the same value, or start without --resume in another folder"
            )
    if meta["extra"].get("text_sha256", digest(corpus)) != digest(corpus):
        raise UsageError(
            f"the text {job.text} has other bytes than when the checkpoint was written; give the same text"
        )
    if int(meta["step"]) >= job.steps:
        raise UsageError(
            f"the checkpoint is at step {meta['step']}, nothing is left of {job.steps} steps; raise --steps"
        )
