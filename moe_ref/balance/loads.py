"""Loads to balance: a model of them, and files of real ones.

The model: popularity by Zipf's law in one fixed random order of the experts, log-normal noise per batch, and every
rank's rows drawn from the noisy popularity (multinomial). It has what matters: skew, drift from batch to batch, and
differences between ranks.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_ref.balance.checks import as_counts
from moe_ref.placement.skew import zipf_popularity


@dataclass(frozen=True)
class LoadModel:
    """Batches with a known popularity.

    Attributes:
        num_ranks, num_experts: P, E.
        skew: Zipf's s; 0 is uniform.
        noise: standard deviation of the logarithm of an expert's popularity, drawn anew for every batch.
        rows_per_rank: token copies (tokens * top_k) of each rank.
        seed: of the order of popularity and of all batches.
    """

    num_ranks: int
    num_experts: int
    skew: float
    noise: float = 0.2
    rows_per_rank: int = 8192
    seed: int = 0

    def popularity(self) -> np.ndarray:
        """Share of each expert without noise, float64 [E]."""
        order = np.random.default_rng((self.seed, 0)).permutation(self.num_experts)
        return zipf_popularity(self.num_experts, self.skew)[order]

    def stale_popularity(self, noise: float = 0.5) -> np.ndarray:
        """A popularity of some time ago: log-normal noise on each share, float64 [E], in sum 1."""
        rng = np.random.default_rng((self.seed, 1))
        share = self.popularity() * np.exp(rng.normal(0.0, noise, self.num_experts))
        return share / share.sum()

    def batches(self, steps: int) -> Iterator[np.ndarray]:
        """Counts of `steps` batches, each int64 [P, E]."""
        rng, popularity = np.random.default_rng((self.seed, 2)), self.popularity()
        for _ in range(steps):
            share = popularity * np.exp(rng.normal(0.0, self.noise, self.num_experts))
            yield rng.multinomial(self.rows_per_rank, share / share.sum(), size=self.num_ranks)


def as_prediction(popularity: np.ndarray) -> np.ndarray:
    """Shares as whole numbers of which only proportions matter, int64 [E]."""
    return np.rint(popularity * 2**30).astype(np.int64)


def split_evenly(load_E: np.ndarray, num_ranks: int) -> np.ndarray:
    """Counts per rank for loads of which only the sum is known, int64 [P, E]: equal parts, remainders to low ranks.

    >>> split_evenly(np.array([5, 2]), 4).tolist()
    [[2, 1], [1, 1], [1, 0], [1, 0]]
    """
    base_E, extra_E = np.divmod(load_E, num_ranks)
    return base_E + (np.arange(num_ranks)[:, None] < extra_E)


@dataclass(frozen=True)
class RealLoads:
    """Loads from a file.

    Attributes:
        load_NTE: rows per expert, int64 [series, steps, E]; a series is one layer on one kind of text, its steps follow
            each other in time.
        domain_N: which kind of text a series belongs to, an index per series.
        layer_N: which layer a series belongs to.
        domain_names: what `domain_N` counts.
    """

    load_NTE: np.ndarray
    domain_N: tuple[int, ...]
    layer_N: tuple[int, ...]
    domain_names: tuple[str, ...]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.load_NTE.shape[2]


_AXES = {2: ("step", "expert"), 3: ("layer", "step", "expert"), 4: ("domain", "layer", "step", "expert")}


def read_loads(path: str | Path) -> RealLoads:
    """Read real loads: rows per expert and step.

    Formats, by suffix: `.npz` with an array `loads` (and, if there, `domains`: names); `.json` with nested lists, or an
    object with `loads`; `.csv` with one step a line, one expert a column (a first line of names is skipped). The axes
    are steps x experts, layers x steps x experts, or domains x layers x steps x experts.

    Raises:
        ValueError: not readable as such, wrong number of axes, or bad loads; the message names the file and the entry.
        OSError: the file can't be opened.
    """
    path = Path(path)
    names: list[str] = []
    readers = {".npz": _read_npz, ".json": _read_json, ".csv": _read_csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path} has suffix {path.suffix!r}, expected one of {', '.join(readers)}")
    array, names = reader(path)
    if array.ndim not in _AXES or 0 in array.shape:
        raise ValueError(
            f"{path}: loads have shape {array.shape}, expected steps x experts, layers x steps x experts, or domains x "
            "layers x steps x experts, none of them empty"
        )
    try:
        loads = as_counts(array, _AXES[array.ndim])
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from None
    domains = loads.shape[0] if loads.ndim == 4 else 1
    if len(names) != domains:
        names = [str(i) for i in range(domains)]
    loads = loads.reshape(-1, *loads.shape[-2:])
    layers = len(loads) // domains
    return RealLoads(
        loads,
        tuple(n // layers for n in range(len(loads))),
        tuple(n % layers for n in range(len(loads))),
        tuple(names),
    )


def _read_npz(path: Path) -> tuple[np.ndarray, list[str]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if "loads" not in file:
                raise ValueError(f"{path} has arrays {sorted(file)}, expected one named 'loads'")
            return file["loads"], [str(n) for n in file["domains"]] if "domains" in file else []
    except (EOFError, ValueError) as error:
        raise ValueError(f"{path} can't be read as npz: {error}") from None
    except Exception as error:  # zipfile.BadZipFile and zlib.error share no base class with the others
        if isinstance(error, OSError):
            raise
        raise ValueError(f"{path} can't be read as npz: {error}") from None


def _read_json(path: Path) -> tuple[np.ndarray, list[str]]:
    try:
        value: Any = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    names: list[str] = []
    if isinstance(value, dict):
        if "loads" not in value:
            raise ValueError(f"{path} has keys {sorted(value)}, expected 'loads'")
        names = [str(n) for n in value.get("domains", [])]
        value = value["loads"]
    try:
        return np.array(value), names
    except ValueError as error:
        raise ValueError(f"{path}: lists of loads differ in length: {error}") from None


def _read_csv(path: Path) -> tuple[np.ndarray, list[str]]:
    try:
        with path.open(newline="") as file:
            lines = [line for line in csv.reader(file) if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not CSV: {error}") from None
    rows: list[list[float]] = []
    for number, line in enumerate(lines):
        try:
            rows.append([int(x) if x.strip().lstrip("-").isdigit() else float(x) for x in line])
        except ValueError:
            if number == 0:
                continue  # names of the experts
            raise ValueError(f"{path}, line {number + 1}: {line!r} are not numbers") from None
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(f"{path}, line {number + 1}: {len(rows[-1])} values, expected {len(rows[0])}")
    return np.array(rows), []
