"""The progress of a training run, on stderr, rank 0 only: a bar, or lines where nobody could see it move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moe_ref.console import err

LINES = 10
"""Lines of a run whose stderr is no terminal."""


@contextmanager
def bar(first: int, steps: int, rank: int) -> Iterator[Callable[[int, str], None]]:
    """Gives show(step, text), which does nothing on other ranks than 0."""
    if rank != 0:
        yield lambda step, text: None
        return
    if not err.is_terminal:
        said = [0]

        def say(step: int, text: str) -> None:
            part = (step - first) * LINES // (steps - first)
            if part > said[0]:
                err.print(f"step {step}/{steps}: {text}", markup=False, highlight=False, soft_wrap=True)
                said[0] = part

        yield say
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
