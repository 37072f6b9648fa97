"""The progress bar of a training run: on stderr, rank 0 only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moe_ref.console import err


@contextmanager
def bar(first: int, steps: int, rank: int) -> Iterator[Callable[[int, str], None]]:
    """Gives show(step, text), which does nothing on other ranks than 0."""
    if rank != 0:
        yield lambda step, text: None
        return
    columns = (
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as progress:
        task = progress.add_task("", total=steps, completed=first)
        yield lambda step, text: progress.update(task, completed=step, description=text)
