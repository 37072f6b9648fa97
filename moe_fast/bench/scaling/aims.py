"""What was aimed at on 8 GPUs beside what was reached, and the papers' figures beside ours.

Letters: S tokens of a rank, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_fast.bench.scaling.figures import FIGURES, Result, Rows, balance, speed

GPUS = 8
"""Ranks that everything is aimed at for."""
BIG = 16384


@dataclass(frozen=True)
class Aim:
    """Something aimed at on GPUS ranks: `reached` finds it in the rows of a figure; `least` or `most`: the bound."""

    what: str
    figure: str
    reached: Callable[[Rows], float | None]
    least: float | None = None
    most: float | None = None


def _at(rows: Rows, **wanted: Any) -> dict[str, Any] | None:
    """The row with these values."""
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def _paper(rows: Rows, name: str) -> float | None:
    row = _at(rows, layer="paper-e128", dtype="bfloat16", tokens=BIG)
    return row[name] if row else None


def _efficiency(rows: Rows) -> float | None:
    """The smallest of the paper's layers."""
    papers = [row for row in rows if row["dtype"] == "bfloat16" and row["tokens"] == BIG]
    found = [row["overlap_efficiency"]["fused"] for row in papers if row["layer"].startswith("paper")]
    return min((value for value in found if value is not None), default=None)


def _qwen3(rows: Rows) -> float | None:
    row = _at(rows, layer="qwen3", tokens=8192)
    return row["tflops_per_gpu"] if row else None


def _qwen3_tokens(rows: Rows) -> float | None:
    row = _at(rows, layer="qwen3", tokens=8192)
    return row["tflops_per_gpu"]["tokens"] if row else None


def _worst_balance(rows: Rows) -> float | None:
    """Scheduled, asymmetric, at the worst skew."""
    return max((row["over_balanced"]["asymmetric"] for row in rows), default=None)


AIMS = (
    Aim("paper's layer, E = 128, S = 16384: times the dense floor", "speed", lambda r: _paper(r, "fused_over_floor"),
        most=1.4),
    Aim("the same: eager chain in times ours", "speed", lambda r: _paper(r, "eager_over_fused"), least=3.0),
    Aim("O_e of the paper's layer, S = 16384, smallest over E", "speed", _efficiency, least=0.9),
    Aim("Qwen3's layer, S = 8192: TFLOP/s of a GPU", "speed", _qwen3, least=300.0),
    Aim("the same, a token once to each rank", "wire", _qwen3_tokens, least=400.0),
    Aim("scheduled, asymmetric, in times perfectly balanced, at the worst skew", "balance", _worst_balance, most=1.03),
)  # fmt: skip


def aims(results: list[Result]) -> Rows:
    """What was aimed at on GPUS ranks, beside what was reached there, and what smaller runs give: nothing was aimed at
    for them, so they meet or miss nothing. None where nothing is measured."""
    rows = []
    for aim in AIMS:
        _, figure = FIGURES[aim.figure]

        def on(gpus: int, aim: Aim = aim, figure: Callable[[list[Result]], Rows] = figure) -> float | None:
            return aim.reached([row for row in figure(results) if row["gpus"] == gpus])

        reached, met = on(GPUS), None
        if reached is not None:
            met = (aim.least is None or reached >= aim.least) and (aim.most is None or reached <= aim.most)
        bound = f"at least {aim.least:g}" if aim.most is None else f"at most {aim.most:g}"
        smaller = {f"on {one['gpus']} GPUs": on(one["gpus"]) for one in results if 1 < one["gpus"] != GPUS}
        rows.append({"what": aim.what, "aim": bound, **smaller, "reached": reached, "met": met})
    return rows


def papers(results: list[Result]) -> Rows:
    """The papers' figures (FlashMoE: 8 H100, FineMoE: 32 H100) beside those of the largest number of ranks here."""
    last = results[-1:]
    layers = [r for r in speed(results) if last and r["gpus"] == last[0]["gpus"]]
    layers = [r for r in layers if r["layer"].startswith("paper") and r["dtype"] == "bfloat16"]
    utilised, skews = [r["utilisation"] for r in FIGURES["timeline"][1](last)], balance(last)
    counted = [r["gpu_operations"] for r in FIGURES["costs"][1](last)]

    def span(values: list[Any], form: str = "g", what: str = "") -> str | None:
        there = [value for value in values if value is not None]
        if not there:
            return None
        low, high = format(min(there), form), format(max(there), form)
        return f"{what}{low}" + (f" to {high}" if high != low else "")

    efficiency = [r["overlap_efficiency"] for r in layers]
    lines = [
        ("FlashMoE", "baselines' latency in times its own", "up to 6.4; 6.6 at 128 experts",
         span([r["eager_over_fused"] for r in layers], what="eager chain ")),
        ("FlashMoE", "the same, of the chain as a CUDA graph", None,
         span([r["graph_over_fused"] for r in layers], what="graph ")),
        ("FlashMoE", "million tokens a second", "17.7", span([r["million_tokens_per_s"] for r in layers])),
        ("FlashMoE", "overlap efficiency", "up to 4 times the baselines'", span([e.get("fused") for e in efficiency])),
        ("FlashMoE", "the same, of the chain", None, span([e.get("eager") for e in efficiency], what="eager ")),
        ("FlashMoE", "SM utilisation", "93.17%", span(utilised, ".1%")),
        ("FlashMoE", "GPU operations of a layer", "1", span([c["fused"] for c in counted])),
        ("FlashMoE", "the same, of others", "33 to 550", span([c["eager"] for c in counted], what="eager chain ")),
        ("FineMoE", "layer time in times perfectly balanced", "1 at every skew",
         span([r["over_balanced"]["asymmetric"] for r in skews], what="asymmetric ")),
        ("FineMoE", "what scheduling adds to dispatch, us", "400", span([r["solving_us"] for r in skews])),
    ]  # fmt: skip
    return [{"paper": name, "figure": what, "there": there, "here": here} for name, what, there, here in lines]
