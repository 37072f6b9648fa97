"""Routings that break things: the inputs on which kernels of this kind were seen to fail.

Used by tests, by the differential harness and by benchmarks, so that all speak of the same cases by the same names.
Random numbers come from one CPU generator per (kind, seed): the same case on every machine.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_ref.config import MoEConfig
from moe_ref.errors import UsageError
from moe_ref.gate import MASKED, Routing
from moe_ref.placement import Placement

KINDS = {
    "uniform": "every expert equally likely",
    "zipf": "expert popularity ~ 1 / (rank + 1)^1.2, as a skewed gate gives",
    "one_expert": "every token's first choice is the same expert",
    "one_rank": "all choices stay on the experts of one rank, as far as it has K of them",
    "masked": "half of the routes are -1",
    "all_masked": "no route at all",
    "duplicates": "the same expert several times in one token's choices",
    "balanced": "every expert gets the same number of rows, up to one",
}
"""Name and meaning of each kind of routing."""


def zipf_popularity(experts: int, exponent: float) -> np.ndarray:
    """Probabilities proportional to 1 / (i + 1)^exponent, [E]."""
    weight_E = 1.0 / np.arange(1, experts + 1, dtype=np.float64) ** exponent
    return weight_E / weight_E.sum()


def _distinct(rng: np.random.Generator, tokens: int, top_k: int, popularity_E: np.ndarray) -> np.ndarray:
    """K distinct experts per token, drawn by popularity without replacement (Gumbel top-k), [S, K]."""
    with np.errstate(divide="ignore"):
        score_SE = np.log(popularity_E) + rng.gumbel(size=(tokens, len(popularity_E)))
    return np.argsort(-score_SE, axis=1, kind="stable")[:, :top_k]


def expert_ids(
    kind: str, tokens: int, config: MoEConfig, seed: int = 0, placement: Placement | None = None
) -> np.ndarray:
    """Expert ids [S, K] of one kind of routing, int64.

    Raises:
        UsageError: unknown kind; the message lists the known ones.
    """
    if kind not in KINDS:
        raise UsageError(f"unknown kind of routing {kind!r}, expected one of {', '.join(KINDS)}")
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    experts, top_k = config.experts, config.top_k
    uniform_E = np.full(experts, 1.0 / experts)
    if kind == "zipf":
        return _distinct(rng, tokens, top_k, zipf_popularity(experts, 1.2))
    if kind == "one_rank":
        held = (placement or Placement.contiguous(experts, 1)).experts_of_rank[0]
        popularity_E = np.full(experts, 1e-30)
        popularity_E[list(held)] = 1.0
        return _distinct(rng, tokens, top_k, popularity_E)
    if kind == "balanced":
        # Token s takes K consecutive experts of a shuffled cycle: loads differ by at most one.
        first_S = np.arange(tokens) * top_k
        return rng.permutation(experts)[(first_S[:, None] + np.arange(top_k)) % experts]
    ids_SK = _distinct(rng, tokens, top_k, uniform_E)
    if kind == "one_expert":
        favourite = experts // 2
        ids_SK = np.where(ids_SK == favourite, ids_SK[:, :1], ids_SK)
        ids_SK[:, 0] = favourite
    elif kind == "masked":
        ids_SK = np.where(rng.random((tokens, top_k)) < 0.5, MASKED, ids_SK)
    elif kind == "all_masked":
        ids_SK = np.full_like(ids_SK, MASKED)
    elif kind == "duplicates":
        ids_SK = np.where(rng.random((tokens, top_k)) < 0.5, ids_SK[:, :1], ids_SK)
    return ids_SK


def make_routing(
    kind: str, tokens: int, config: MoEConfig, seed: int = 0, placement: Placement | None = None
) -> Routing:
    """A routing of that kind with random weights: positive, summing to 1 over a token's K choices."""
    ids_SK = expert_ids(kind, tokens, config, seed, placement)
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    weight_SK = torch.rand(tokens, config.top_k, generator=generator, dtype=torch.float64) + 0.1
    weight_SK = weight_SK / weight_SK.sum(dim=1, keepdim=True)
    return Routing(torch.from_numpy(ids_SK.astype(np.int64)), weight_SK.to(dtype))


def make_tokens(tokens: int, config: MoEConfig, seed: int = 0) -> Tensor:
    """Standard normal hidden states [S, H] in the config's dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, config.hidden, generator=generator).to(config.torch_dtype)
