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

from moe_ref.environment import rank_from_environment

__all__ = ["err", "forget", "out", "print_json", "rank_from_environment"]


class _Console(Console):
    """A console whose reader may go away (`moe-ref ... | head`): what is left unsaid does not change the exit code."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        forget(sys.stderr if self.stderr else sys.stdout)


err = _Console(stderr=True, force_jupyter=False)
"""Progress, warnings and errors."""

out = _Console(force_jupyter=False)
"""Human-readable reports (never used together with --json)."""


def forget(stream: Any) -> None:
    """Send what is still to come on `stream` nowhere, what Python flushes at its end included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


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
    """Print one JSON object on one line of stdout, on rank 0 only; a reader who has gone away is no error."""
    if rank_from_environment() != 0:
        return
    try:
        sys.stdout.write(json.dumps(_plain(value), allow_nan=False) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        forget(sys.stdout)
