"""What `simulate` and `trace` have in common: options of the machine, the layer and its disturbances.

`--tokens` is per rank, as everywhere; times are microseconds of the simulated machine, not of this one.
"""

from __future__ import annotations

import math
from typing import Annotated

import typer

from moe_ref.errors import UsageError
from moe_ref.limits import check_memory, check_seed
from moe_ref.runtime.machine import PRESETS, Machine, Noise
from moe_ref.runtime.workload import Workload

ELEMENT_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4}

MachineOption = Annotated[str, typer.Option("--machine", help=f"Preset: {', '.join(PRESETS)}.")]
RanksOption = Annotated[int | None, typer.Option("--ranks", help="GPUs; all of the machine's if not given.")]
TokensOption = Annotated[int, typer.Option("--tokens", help="Tokens per rank.")]
ExpertsOption = Annotated[int, typer.Option("--experts", help="Experts of the layer.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="Experts per token.")]
HiddenOption = Annotated[int, typer.Option("--hidden", help="Hidden size H.")]
IntermediateOption = Annotated[int, typer.Option("--intermediate", help="Intermediate size D of an expert.")]
GatedOption = Annotated[bool, typer.Option("--gated/--plain", help="Gated (SwiGLU-like) or plain expert FFN.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32 (TF32 tiles).")]
LayoutOption = Annotated[str, typer.Option("--layout", help="compact, or fixed (the paper's).")]
CapacityOption = Annotated[
    float | None, typer.Option("--capacity-factor", help="Drop rows beyond factor * S * K / E; not given: never drop.")
]
SkewOption = Annotated[float, typer.Option("--skew", help="0 routes evenly; 1 is a Zipf law over the experts.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of routing and noise.")]
JitterOption = Annotated[float, typer.Option("--jitter", help="Relative spread of every duration.")]
LaunchJitterOption = Annotated[float, typer.Option("--launch-jitter", help="Ranks start up to this many us apart.")]
StragglerOption = Annotated[int, typer.Option("--straggler", help="Rank that is slow; -1 for none.")]
SlowdownOption = Annotated[float, typer.Option("--slowdown", help="How much longer the straggler's work takes.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def workload(
    preset: Machine, ranks: int | None, tokens: int, experts: int, top_k: int, hidden: int, intermediate: int,
    gated: bool, dtype: str, layout: str, capacity: float | None, skew: float, seed: int,
) -> Workload:  # fmt: skip
    """The layer that the options describe, checked."""
    if dtype not in ELEMENT_SIZE:
        raise UsageError(f"--dtype is {dtype!r}, expected one of {', '.join(ELEMENT_SIZE)}")
    if layout not in ("compact", "fixed"):
        raise UsageError(f"--layout is {layout!r}, expected compact or fixed")
    check_seed(seed, "--seed")
    count = preset.gpus if ranks is None else ranks
    if count > preset.gpus:
        raise UsageError(f"--ranks is {count}, but machine {preset.name} has {preset.gpus} GPUs")
    made = Workload(
        count, tokens, experts, top_k, hidden, intermediate, gated, ELEMENT_SIZE[dtype],
        layout=layout, capacity_factor=capacity, skew=skew, seed=seed,
    )  # fmt: skip
    check_memory(made.memory_bytes, f"{count} ranks x {tokens} tokens x {top_k} choices", "give fewer tokens")
    return made


def noise(ranks: int, jitter: float, launch_jitter: float, straggler: int, slowdown: float, seed: int) -> Noise:
    """The disturbances that the options describe, checked."""
    if not -1 <= straggler < ranks:
        raise UsageError(f"--straggler is {straggler}, expected a rank from 0 to {ranks - 1}, or -1 for none")
    if not all(map(math.isfinite, (jitter, launch_jitter, slowdown))):
        raise UsageError("--jitter, --launch-jitter and --slowdown must be finite numbers")
    return Noise(jitter, launch_jitter, straggler, slowdown, seed)


def describe(work: Workload, preset: Machine) -> str:
    """Machine and layer in one line, for titles."""
    return (
        f"{preset.name}: {work.ranks} x {work.tokens} tokens, E {work.experts}, K {work.top_k}, "
        f"H {work.hidden}, D {work.intermediate}, {'gated' if work.gated else 'plain'}, "
        f"{'fp32' if work.element_size == 4 else '16 bit'}, {work.layout}"
    )
