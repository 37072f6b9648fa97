"""The benchmark's layers, the tokens that each is timed at, and what is aimed at."""

from __future__ import annotations

import re

from moe_ref.config import MoEConfig
from moe_ref.errors import UsageError


def _paper(experts: int) -> MoEConfig:
    return MoEConfig(2048, 2048, experts, 2, activation="relu", gated=False, dtype="bfloat16")


LAYERS: dict[str, MoEConfig] = {
    "paper-e8": _paper(8),
    "paper-e32": _paper(32),
    "paper-e128": _paper(128),
    "qwen3": MoEConfig(2048, 768, 128, 8, dtype="bfloat16"),
    "mixtral": MoEConfig(4096, 14336, 8, 2, dtype="bfloat16"),
}
TOKENS: dict[str, tuple[int, ...]] = {
    "paper-e8": (32, 128, 1024, 4096, 8192, 16384),
    "paper-e32": (32, 128, 1024, 4096, 8192, 16384),
    "paper-e128": (32, 128, 1024, 4096, 8192, 16384),
    "qwen3": (32, 128, 1024, 4096, 8192, 16384),
    "mixtral": (32, 128, 1024, 4096, 8192),
}


TARGETS: dict[tuple[str, int], dict[int, float]] = {
    ("paper-e8", 2): {16384: 1.2, 8192: 1.3, 4096: 1.6},
    ("paper-e32", 2): {16384: 1.2, 8192: 1.3, 4096: 1.6},
    ("paper-e128", 2): {16384: 1.3, 8192: 1.5, 4096: 2.1},
    ("qwen3", 2): {16384: 1.3, 8192: 1.4, 4096: 1.75, 1024: 3.2},
    ("qwen3", 1): {16384: 1.3, 8192: 1.4, 4096: 1.65, 1024: 3.6},
    ("mixtral", 2): {8192: 1.08, 4096: 1.1, 1024: 1.35},
}
"""(layer, GPUs) -> S -> the time aimed at, in times the dense floor of the same run."""


def layer_config(name: str) -> MoEConfig:
    """A layer by name: one of LAYERS, or "paper-eN", the paper's layer with N experts.

    Raises:
        UsageError: there is no such layer.
    """
    if name in LAYERS:
        return LAYERS[name]
    if found := re.fullmatch(r"paper-e([1-9]\d{0,3})", name):
        return _paper(int(found[1]))
    raise UsageError(f"unknown layer {name!r}; known: {', '.join(LAYERS)}, paper-eN")
