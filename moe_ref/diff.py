"""The differential harness: two backends on the same layer and input, compared stage by stage and tile by tile.

    report = compare("fused", "ref", layer, xs)      # two backends, every named intermediate
    report = check(my_moe)                           # a function of your own: y = my_moe(x, weights, routing)
    print(report); assert report.ok

The report names the first stage, rank, expert, tile, row and column that differ. Later stages of the same forward are
compared too, but a difference there may be inherited; `start_from` feeds a stage the other side's results to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moe_ref import backends, cases
from moe_ref.comparison import TOLERANCE, BufferResult, Difference, Report, compare_buffer, compare_records
from moe_ref.config import MoEConfig
from moe_ref.definition import relative_error
from moe_ref.errors import UsageError
from moe_ref.gate import Routing
from moe_ref.layer import MoELayer
from moe_ref.pipeline import STAGES, Record

__all__ = ["TOLERANCE", "BufferResult", "Difference", "Report", "check", "compare", "compare_records"]


def compare(
    backend: str | backends.Backend,
    against: str | backends.Backend,
    layer: MoELayer,
    x_SH: Sequence[Tensor],
    routing: Sequence[Routing] | None = None,
    *,
    tile_rows: int | None = None,
    start_from: str | None = None,
    stop_after: str = "combine",
) -> Report:
    """Run two backends on the same layer and input and compare every intermediate.

    Args:
        backend, against: names in the registry, or backend objects; the second one is right by assumption.
        x_SH: per local rank its tokens; routing: per local rank, or None to use the gate.
        tile_rows: height of the tiles in the report; the config's by default.
        start_from: give the first backend the other's results of all stages before this one ("gemm0", "gemm1" or
            "return"); needs a backend with a `given` argument, such as "ref".
        stop_after: last stage to compare.

    Raises:
        UsageError: unknown stage, or start_from with a backend that can't start in the middle.
    """
    left = backends.get(backend) if isinstance(backend, str) else backend
    right = backends.get(against) if isinstance(against, str) else against
    for one in (left, right):
        reason = one.unavailable()
        if reason:
            raise UsageError(f"backend {one.name!r} can't run here: {reason}")
    if tile_rows is not None and tile_rows < 1:
        raise UsageError(f"tile_rows is {tile_rows}, expected at least 1")
    x_SH, routing = layer.check_input(x_SH, routing)
    for stage in (stop_after, start_from):
        if stage is not None and stage not in STAGES:
            raise UsageError(f"unknown stage {stage!r}, expected one of {', '.join(STAGES)}")
    with torch.no_grad():
        expected = right.forward(layer, x_SH, routing, keep=True)
        if start_from is None:
            actual = left.forward(layer, x_SH, routing, keep=True)
        else:
            resume = getattr(left, "resume", None)
            if resume is None or start_from not in ("gemm0", "gemm1", "return"):
                raise UsageError(
                    f"backend {left.name!r} can't start from {start_from!r}; stages to start from are gemm0, gemm1 and "
                    "return, for backends that run stage by stage (ref)"
                )
            keep = {"gemm0": "rows_NH", "gemm1": "hidden_ND", "return": "output_NH"}[start_from]
            actual = resume(layer, x_SH, expected.routing, Record(**{keep: getattr(expected, keep)}))
    config = layer.config
    results, missing = compare_records(
        actual,
        expected,
        layer.world.local_ranks,
        config.torch_dtype,
        tile_rows or config.tile_rows,
        max(backends.tolerance(one, config.dtype) for one in (left, right)),
    )
    last = STAGES.index(stop_after)
    note = f"not compared, since only one side has it: {', '.join(missing)}" if missing else ""
    return Report(left.name, right.name, [r for r in results if STAGES.index(r.stage) <= last], note)


# --- a function of the user's own ----------------------------------------------------------------------------------

DEFAULT_SIZES = (0, 1, 15, 16, 17, 100, 129)
"""Numbers of tokens around tile borders."""

Weights = Mapping[str, Tensor]


def check(
    function: Callable[[Tensor, Weights, Routing], Tensor],
    config: MoEConfig | None = None,
    *,
    sizes: Sequence[int] = DEFAULT_SIZES,
    kinds: Sequence[str] = tuple(cases.KINDS),
    tile_rows: int = 16,
    device: str = "cpu",
    seed: int = 0,
) -> Report:
    """Put y = function(x, weights, routing) under test: every kind of routing at every size, against the reference.

    Args:
        function: takes x [S, H], the layer's parameters by name (gate_up_proj [E, 2D, H], down_proj [E, H, D], ...) and
            a Routing; returns y [S, H].
        config: the layer; by default 8 gated experts, H 64, D 96, K 2, fp32.
        sizes, kinds: what to try (see moe_ref.cases.KINDS).
        tile_rows: height of the token tiles in the report.

    Returns:
        A report of the first case that differs (or of the last one if none does); its note names the case and, where
        the wrong tokens have one expert in common, that expert.
    """
    config = config or MoEConfig(hidden=64, intermediate=96, experts=8, top_k=2)
    layer = MoELayer(config, seed=seed, device=device)
    name = getattr(function, "__name__", "function")
    report = Report(name, "ref", [], "no case was run")
    if not kinds or not any(size > 0 for size in sizes):
        raise UsageError(f"sizes {list(sizes)} and kinds {list(kinds)} leave nothing to test; give one size above 0")
    for kind in kinds:
        for tokens in sizes:
            x_SH = cases.make_tokens(tokens, config, seed + tokens).to(device)
            routing = cases.make_routing(kind, tokens, config, seed + tokens)
            routing = Routing(routing.expert_SK.to(device), routing.weight_SK.to(device))
            with torch.no_grad():
                expected = layer._backend.forward(layer, [x_SH], [routing])
                # Copies: a function that writes into what it was given must not change what it is held against.
                weights = {key: value.detach().clone() for key, value in layer.state_dict().items()}
                y_SH = function(x_SH.clone(), weights, Routing(routing.expert_SK.clone(), routing.weight_SK.clone()))
            good = isinstance(y_SH, Tensor) and y_SH.dtype == config.torch_dtype and y_SH.shape == x_SH.shape
            got = f"{y_SH.dtype} tensor {list(y_SH.shape)}" if isinstance(y_SH, Tensor) else type(y_SH).__name__
            if not good:
                raise UsageError(f"{name} returned a {got}, expected a {config.torch_dtype} tensor {list(x_SH.shape)}")
            result = compare_buffer(
                "combine", "y_SH", Record(y_SH=[y_SH]), expected, (0,), config.torch_dtype, tile_rows
            )
            assert result is not None
            assert expected.y_SH is not None
            note = f"case: {kind} ({cases.KINDS[kind]}), {tokens} tokens, seed {seed}"
            if not result.ok:
                note += _suspects(y_SH, expected.y_SH[0], routing, TOLERANCE[config.torch_dtype])
            report = Report(name, "ref", [result], note)
            if not result.ok:
                return report
    return report


def _suspects(y_SH: Tensor, expected_SH: Tensor, routing: Routing, tolerance: float) -> str:
    """Experts that all wrong tokens have in common and no right token has."""
    # "not <=" rather than ">": a NaN is wrong.
    wrong_S = torch.tensor(
        [not relative_error(a, b) <= tolerance for a, b in zip(y_SH, expected_SH, strict=True)], dtype=torch.bool
    )
    ids_SK = routing.expert_SK.cpu()
    if not bool(wrong_S.any()):
        return ""
    common = set(ids_SK[wrong_S][0].tolist()) - {-1}
    for row in ids_SK[wrong_S].tolist():
        common &= set(row)
    common -= set(ids_SK[~wrong_S].flatten().tolist())
    count = int(wrong_S.sum())
    if common:
        return (
            f"; {count} wrong tokens, all of them and no other routed to expert {', '.join(map(str, sorted(common)))}"
        )
    return f"; {count} of {len(wrong_S)} tokens wrong"
