"""Expert placement by graph theory (FineMoE, sections 5 and 6)."""

from moe_ref.placement.placement import Placement

__all__ = ["Placement"]
