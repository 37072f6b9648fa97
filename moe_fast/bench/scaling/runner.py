"""Cell after cell into one file: each is written as soon as it is measured, and what is there is not measured again.

A run that is killed loses the cell that was running, no more. That cell comes last the next time; one that has ended
two runs is passed over, and the report names it. A file holds one kind of run: other settings, another commit or other
devices are refused instead of mixed.

Every rank calls `run`; rank 0 decides what is measured and whether there is time, and alone touches the file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_fast.bench.scaling.cells import FIGURES, Cell, Planned
from moe_ref.errors import UsageError
from moe_ref.limits import regular_file_size
from moe_ref.results import PROVENANCE_KEYS, write_results

Row = dict[str, Any]
SAME = ("gpus", "repetitions", "scheduler", "commit", "device")
"""Keys that must agree between a file and the run that goes on with it."""
MOST_ATTEMPTS = 2
PATIENCE = 1.5
"""A cell is begun if this many times the longest one of its figure so far still fits into the budget."""


def read(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        UsageError: it is none of a scaling run; the message says why.
    """
    regular_file_size(path, "results that `bench scaling` wrote")
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(found, dict) or not {*PROVENANCE_KEYS, "gpus", "cells"} <= set(found):
        raise UsageError(f"{path} holds no scaling run, expected results that `bench scaling` wrote")
    for figure in FIGURES:
        rows = found.get(figure, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) and "cell" in row for row in rows):
            raise UsageError(f"{path}: {figure!r} is no list of measured cells; give another --out")
    return found


@dataclass
class Store:
    """The result file of a run, and what it holds.

    Attributes:
        path: of the file; None keeps everything in memory.
        values: the result as it is written: provenance, settings, "cells" (how many there are in all), a list of rows
            per figure, "left_out", and while not all are there "interrupted": how often each key has ended a run.
    """

    path: Path | None
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | None, header: dict[str, Any], anew: bool = False) -> Store:
        """Begin a file, or go on with the one that is there.

        Args:
            header: title, description, provenance and settings of this run, "cells" and "left_out" apart.
            anew: leave aside what is there.

        Raises:
            UsageError: the file is of another kind of run; the message names what differs and what to do.
        """
        if path is None or anew or not path.exists():
            return cls(path, dict(header))
        values = read(path)
        different = [
            f"{key} {values.get(key)!r}, now {header.get(key)!r}" for key in SAME if values.get(key) != header.get(key)
        ]
        if different:
            raise UsageError(
                f"{path} was written under other conditions ({'; '.join(different)}): give another --out, or --anew to "
                "replace it"
            )
        return cls(path, values)

    def expect(self, planned: Planned) -> None:
        """Say what the whole of it is: the cells of this plan, and those that an earlier plan put there."""
        self.values["cells"] = len({cell.key for cell in planned.cells} | self.done)
        self.values["left_out"] = [{"cell": key, "why": why} for key, why in planned.left_out]

    @property
    def done(self) -> set[str]:
        """Keys of the cells that are there."""
        return {row["cell"] for figure in FIGURES for row in self.values.get(figure, [])}

    @property
    def interrupted(self) -> dict[str, int]:
        """How many runs each key has ended."""
        return dict(self.values.get("interrupted", {}))

    def begin(self, key: str) -> None:
        """Note that a cell is being measured, so that a run that ends here is known to have."""
        self.values["interrupted"] = {**self.interrupted, key: self.interrupted.get(key, 0) + 1}
        self._write()

    def add(self, cell: Cell, row: Row) -> None:
        """Keep a measured cell, and forget that it was ever begun."""
        self.values.setdefault(cell.figure, []).append({"cell": cell.key, **row})
        rest = {key: count for key, count in self.interrupted.items() if key != cell.key}
        self.values["interrupted"] = rest
        if not rest:
            del self.values["interrupted"]
        self._write()

    def put(self, **more: Any) -> None:
        """Keep what follows from all cells."""
        self.values |= more
        self._write()

    def _write(self) -> None:
        """Beside the file, then in its place: a run that is killed while it writes leaves the file as it was."""
        if self.path is None:
            return
        ordered = {key: value for key, value in self.values.items() if key not in FIGURES}
        ordered |= {figure: self.values[figure] for figure in FIGURES if figure in self.values}
        part = self.path.with_name(self.path.name + ".part")
        write_results(part, ordered)
        os.replace(part, self.path)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: cells measured now, and keys that are still missing because of the budget, or given up."""

    measured: int
    left: tuple[str, ...]
    given_up: tuple[str, ...]


def order(cells: tuple[Cell, ...], done: set[str], interrupted: dict[str, int]) -> tuple[list[Cell], list[str]]:
    """(cells to measure, those that ended a run last; keys that are given up)."""
    missing = [cell for cell in cells if cell.key not in done]
    given_up = [cell.key for cell in missing if interrupted.get(cell.key, 0) >= MOST_ATTEMPTS]
    todo = [cell for cell in missing if cell.key not in given_up]
    return sorted(todo, key=lambda cell: interrupted.get(cell.key, 0)), given_up


def run(
    cells: tuple[Cell, ...],
    measure: Callable[[Cell], Row],
    store: Store | None,
    budget_s: float | None = None,
    agree: Callable[[Any], Any] = lambda value: value,
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Measure what is missing; collective.

    Args:
        measure: called by every rank for every cell; its row is kept on rank 0.
        store: the file, on rank 0; None on the others.
        budget_s: seconds after which no cell is begun.
        agree: rank 0's value on every rank.
        say: shows progress; rank 0's does.
    """
    start, took = clock(), dict[str, float]()
    todo, given_up = agree(order(cells, store.done, store.interrupted) if store else None)
    for number, cell in enumerate(todo):
        expected = took.get(cell.figure, max(took.values(), default=0.0))
        go_on = budget_s is None or clock() - start + PATIENCE * expected <= budget_s
        if not agree(go_on):
            left = tuple(cell.key for cell in todo[number:])
            say(f"the budget of {budget_s:g} s is spent: {len(left)} cells left; the same command goes on with them")
            return Outcome(number, left, tuple(given_up))
        if store:
            store.begin(cell.key)
        begun = clock()
        row = measure(cell)
        seconds = clock() - begun
        took[cell.figure] = max(took.get(cell.figure, 0.0), seconds)
        if store:
            store.add(cell, row)
        remaining = sum(took.get(rest.figure, max(took.values())) for rest in todo[number + 1 :])
        say(f"[{number + 1}/{len(todo)}] {cell.key}: {brief(row)} ({seconds:.1f} s, at most {remaining:.0f} s to go)")
    return Outcome(len(todo), (), tuple(given_up))


def brief(row: Row) -> str:
    """The times of a row in a few words."""
    ms = row.get("ms", {})
    times = ms.items() if isinstance(ms, dict) else [("step", ms)]
    parts = [f"{name} {value['median'] if isinstance(value, dict) else value:.3f}" for name, value in times]
    return f"{', '.join(parts)} ms" if parts else "done"
