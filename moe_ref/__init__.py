"""A distributed Mixture-of-Experts layer in plain PyTorch: the oracle of this project."""

from moe_ref._version import __version__
from moe_ref.config import MoEConfig
from moe_ref.gate import Routing
from moe_ref.layer import LayerStats, MoELayer
from moe_ref.placement import Placement
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
