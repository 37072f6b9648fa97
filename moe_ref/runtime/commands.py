"""`moe-ref simulate`, `moe-ref trace` and `moe-ref protocol`: the actor runtime from the command line."""

from __future__ import annotations

import typer

from moe_ref.runtime import protocol_command
from moe_ref.runtime.simulate_command import simulate
from moe_ref.runtime.trace_command import trace


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("simulate")(simulate)
    app.command("trace")(trace)
    protocol_command.register(app)
