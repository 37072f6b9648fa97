"""What follows from scaling runs: throughput, overlap efficiency, rates, the simulator's error.

Takes the result files of several numbers of ranks together, for overlap efficiency compares them: O_e = T(2) / T(P),
the time of a call on two ranks over that on P ranks, tokens of a rank and the layer's experts the same. Two ranks alone
have none: it would be 1 by definition.

Letters: S tokens of a rank, E experts, K choices, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from moe_fast.bench import prediction
from moe_fast.bench.layers import layer_config
from moe_fast.bench.scaling.cells import FIGURES as MEASURED
from moe_ref.errors import UsageError

Result = dict[str, Any]
Rows = list[dict[str, Any]]


def ordered(results: Iterable[Result]) -> list[Result]:
    """By number of ranks.

    Raises:
        UsageError: two of the same number.
    """
    out = sorted(results, key=lambda one: one["gpus"])
    counts = [one["gpus"] for one in out]
    if len(set(counts)) < len(counts):
        raise UsageError(f"two results of the same number of GPUs ({counts}); give one of each")
    return out


def flops(layer: str, tokens: int) -> float:
    """Of a rank's routed rows, both products: 2 S K H (U + D), U the rows of the first weight matrix."""
    c = layer_config(layer)
    return 2.0 * tokens * c.top_k * c.hidden * (c.up_rows + c.intermediate)


def _teraflops(layer: str, tokens: int, ms: float) -> float:
    return round(flops(layer, tokens) / ms / 1e9, 1)


def speed(results: list[Result]) -> Rows:
    """Every latency cell of every number of ranks: times, ratios, million tokens a second, TFLOP/s of a GPU, O_e."""
    two = {row["cell"]: row["ms"] for one in results if one["gpus"] == 2 for row in one.get("latency", [])}
    rows = []
    for one in results:
        for row in one.get("latency", []):
            ms = {name: value["median"] for name, value in row["ms"].items()}
            out = {"layer": row["layer"], "dtype": row["dtype"], "gpus": one["gpus"], "tokens": row["tokens"]}
            out |= {"experts": row["experts"], "ms": ms, "fused_over_floor": round(ms["fused"] / ms["floor"], 3)}
            for name in ("eager", "graph"):
                out[f"{name}_over_fused"] = round(ms[name] / ms["fused"], 2) if name in ms else None
            out["million_tokens_per_s"] = round(one["gpus"] * row["tokens"] / ms["fused"] / 1e3, 2)
            out["tflops_per_gpu"] = _teraflops(row["layer"], row["tokens"], ms["fused"])
            before = two.get(row["cell"], {})
            out["overlap_efficiency"] = {
                name: round(before[name]["median"] / value, 3) if name in before and one["gpus"] > 2 else None
                for name, value in ms.items()
                if name != "floor"
            }
            rows.append(out)
    return rows


def wire(results: list[Result]) -> Rows:
    """Both wire formats side by side, with TFLOP/s of a GPU."""
    rows = []
    for one in results:
        for row in one.get("wire", []):
            ms = {name: value["median"] for name, value in row["ms"].items()}
            out = {"layer": row["layer"], "gpus": one["gpus"], "tokens": row["tokens"], "ms": ms}
            out["tflops_per_gpu"] = {name: _teraflops(row["layer"], row["tokens"], t) for name, t in ms.items()}
            out["remote_bytes"] = row["remote_bytes"]
            rows.append(out)
    return rows


def balance(results: list[Result]) -> Rows:
    """Times of every contestant at every skew, and what each is in times the perfectly balanced one."""
    rows = []
    for one in results:
        for row in one.get("balance", []):
            out = {"layer": row["layer"], "gpus": one["gpus"], "tokens": row["tokens"], "zipf": row["zipf"]}
            out["ms"] = {name: value["median"] for name, value in row["ms"].items()}
            out["over_balanced"] = row["over_balanced"]
            out["max_over_mean_load"] = row["max_over_mean_load"]
            out["solving_us"] = round(1e3 * row["solving_ms"], 1)
            rows.append(out)
    return rows


def stages(results: list[Result]) -> Rows:
    """Microseconds of every stage, per skew and contestant."""
    rows = []
    for one in results:
        for row in one.get("balance", []):
            rows += [
                {"gpus": one["gpus"], "zipf": row["zipf"], "contestant": name, **times}
                for name, times in row["stages_us"].items()
            ]
    return rows


def _plain(figure: str, drop: tuple[str, ...]) -> Callable[[list[Result]], Rows]:
    """The rows of a figure as they were measured, without some keys."""

    def rows(results: list[Result]) -> Rows:
        return [
            {key: value for key, value in row.items() if key not in ("cell", *drop)}
            for one in results
            for row in one.get(figure, [])
        ]

    return rows


FIGURES: dict[str, tuple[str, Callable[[list[Result]], Rows]]] = {
    "speed": ("Latency, throughput and overlap efficiency", speed),
    "wire": ("Wire formats", wire),
    "timeline": ("Utilisation", _plain("timeline", ("scheduler", "starts_us", "dropped_events"))),
    "costs": ("GPU operations and bytes of a GPU", _plain("costs", ())),
    "balance": ("Balance", balance),
    "stages": ("Stages of a call, microseconds", stages),
    "training": ("Step time of a small GPT-MoE, ms", _plain("training", ())),
}
"""Name -> (title, rows of several results)."""


def predicted(result: Result) -> dict[str, Any] | None:
    """The simulator, fitted to every second bf16 latency cell of this number of ranks, on those that it has not seen;
    None where there are too few."""
    rows = [row for row in result.get("latency", []) if row["dtype"] == "bfloat16"]
    rows.sort(key=lambda row: (row["layer"], row["tokens"]))
    if len(rows) // 2 < len(prediction.FITTED):
        return None
    return prediction.predict_rows(rows, "h200-2" if result["gpus"] <= 2 else "h200-8")


def missing(result: Result) -> int:
    """How many cells a run has not measured yet."""
    return result["cells"] - sum(len(result.get(figure, [])) for figure in MEASURED)
