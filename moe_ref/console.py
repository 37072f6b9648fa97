"""What commands print through: results on stdout, everything else on stderr, rank 0 only.

`--json` prints exactly one JSON object on one line of stdout; reports, progress and warnings of the same command go to
stderr, so a program can always parse stdout as it stands.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

from rich.console import Console

err = Console(stderr=True, force_jupyter=False)
"""Progress, warnings and errors."""

out = Console(force_jupyter=False)
"""Human-readable reports (never used together with --json)."""


def rank_from_environment() -> int:
    """This process' rank as torchrun states it; 0 outside torchrun."""
    return int(os.environ.get("RANK", "0"))


def _plain(value: Any) -> Any:
    """Turn numpy and torch scalars and arrays into plain values; non-finite floats become null (JSON has none)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    return value


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on one line of stdout, on rank 0 only."""
    if rank_from_environment() == 0:
        sys.stdout.write(json.dumps(_plain(value), allow_nan=False) + "\n")
        sys.stdout.flush()
