"""A distributed Mixture-of-Experts layer in plain PyTorch: the oracle of this project."""

from moe_ref._version import __version__
from moe_ref.config import MoEConfig

__all__ = ["MoEConfig", "__version__"]
