"""Recorded runs that the h200-2 preset is fitted to.

All on 2 x NVIDIA H200 (NVLink, 18 lanes), CUDA 13.0, torch 2.11, bf16, 2026-11-29; milliseconds per forward, median of
CUDA-event timings, slowest rank. Three kinds:

    products    both grouped products alone (torch grouped_mm), rows perfectly balanced
    chain       gate, sort, NCCL all-to-all, grouped_mm, all-to-all, index_add: what torch gives, not graph-captured
    tiles       one persistent kernel with dispatch, GEMM0, GEMM1 and return on tiles of 128 x 256, an OS block and 131
                processors; no gate and no weighted sum, on one rank no dispatch either (a throwaway prototype)

Letters: S tokens of a rank, H hidden, D intermediate, E experts, K choices per token, P ranks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from moe_ref.errors import UsageError
from moe_ref.limits import regular_file_size
from moe_ref.runtime.workload import Workload

Kind = Literal["products", "chain", "tiles", "megakernel"]


@dataclass(frozen=True)
class Record:
    """One measured time. `kind` as in the module's docstring, or "megakernel": gate to combine in one kernel."""

    kind: Kind
    work: Workload
    ms: float


_QWEN3 = {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8, "gated": True}
_MIXTRAL = {"hidden": 4096, "intermediate": 14336, "experts": 8, "top_k": 2, "gated": True}
_MIDDLE = {"hidden": 2048, "intermediate": 2048, "experts": 64, "top_k": 2, "gated": True}
_PAPER = {"hidden": 2048, "intermediate": 2048, "top_k": 2, "gated": False}


def _row(layer: dict, ranks: int, tokens: tuple[int, ...], products: tuple[float, ...], chain: tuple[float, ...]):
    out = []
    for s, p, c in zip(tokens, products, chain, strict=True):
        work = Workload(ranks=ranks, tokens=s, **layer)
        out += [Record("products", work, p), Record("chain", work, c)]
    return out


H200: tuple[Record, ...] = (
    *_row(_QWEN3, 2, (1024, 4096, 8192, 16384), (0.285, 0.626, 1.126, 2.25), (2.05, 3.63, 5.73, 10.6)),
    *_row(_QWEN3, 1, (1024, 4096, 8192, 16384), (0.466, 0.636, 1.10, 2.09), (1.32, 2.06, 3.54, 6.50)),
    *_row(_MIXTRAL, 2, (1024, 4096, 8192), (1.13, 4.44, 9.15), (2.91, 6.62, 12.0)),
    *_row(_MIXTRAL, 1, (1024, 4096, 8192), (1.11, 4.46, 9.15), (2.03, 5.47, 10.7)),
    *_row(_MIDDLE, 2, (1024, 4096, 8192, 16384), (0.385, 0.425, 0.733, 1.40), (1.21, 1.84, 2.58, 4.40)),
    *_row({**_PAPER, "experts": 8}, 2, (4096, 8192, 16384), (0.25, 0.44, 0.87), (1.67, 2.46, 3.91)),
    *_row({**_PAPER, "experts": 32}, 2, (4096, 8192, 16384), (0.26, 0.47, 0.86), (2.08, 2.77, 3.96)),
    *_row({**_PAPER, "experts": 128}, 2, (4096, 8192, 16384), (0.40, 0.50, 0.92), (2.23, 2.87, 4.01)),
    Record("tiles", Workload(ranks=1, tokens=16384, experts=8), 0.717),
    Record("tiles", Workload(ranks=1, tokens=16384, experts=32), 0.766),
    Record("tiles", Workload(ranks=1, tokens=16384, experts=128), 0.889),
    # Recorded as ranges over repetitions, 0.82-0.845 and 0.88-0.93: their middle.
    Record("tiles", Workload(ranks=2, tokens=16384, experts=16), 0.8325),
    Record("tiles", Workload(ranks=2, tokens=16384, experts=64), 0.905),
)
"""See the module's docstring."""


def load_records(path: Path) -> list[Record]:
    """Read records from a JSON file: a list of objects {kind, ms, ranks, tokens, experts, top_k, hidden, ...}.

    Raises:
        UsageError: the file is no such list; the message names the entry and the field.
    """
    regular_file_size(path, "a JSON list of records")
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path} holds {type(entries).__name__}, expected a list of records")
    records = []
    for i, entry in enumerate(entries):
        try:
            values = dict(entry)
            kind, ms = values.pop("kind"), float(values.pop("ms"))
            records.append(Record(kind, Workload(**values), ms))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"record {i} of {path} is not usable: {error}") from None
        if kind not in get_args(Kind) or not ms > 0:
            raise UsageError(f"record {i} of {path}: kind is {kind!r} ({', '.join(get_args(Kind))}), ms is {ms} (> 0)")
    return records
