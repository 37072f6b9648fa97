"""A distributed Mixture-of-Experts layer in plain PyTorch: the oracle of this project.

Names are imported when they are first used: `moe_ref.balance` and `moe_ref.placement` know no tensors, and whoever uses
them alone does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moe_ref._version import __version__

if TYPE_CHECKING:
    from moe_ref.config import MoEConfig
    from moe_ref.gate import Routing
    from moe_ref.layer import MoELayer
    from moe_ref.placement import Placement
    from moe_ref.stats import LayerStats
    from moe_ref.world import DistributedWorld, SimulatedWorld

__all__ = [
    "DistributedWorld",
    "LayerStats",
    "MoEConfig",
    "MoELayer",
    "Placement",
    "Routing",
    "SimulatedWorld",
    "__version__",
]

_HOME = {
    "DistributedWorld": "moe_ref.world",
    "LayerStats": "moe_ref.stats",
    "MoEConfig": "moe_ref.config",
    "MoELayer": "moe_ref.layer",
    "Placement": "moe_ref.placement",
    "Routing": "moe_ref.gate",
    "SimulatedWorld": "moe_ref.world",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moe_ref' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
