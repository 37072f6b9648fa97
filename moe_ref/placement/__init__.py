"""Expert placement by graph theory (FineMoE, sections 5 and 6)."""

from moe_ref.placement.asymmetric import asymmetric
from moe_ref.placement.density import Density, max_density
from moe_ref.placement.names import by_name
from moe_ref.placement.symmetric import Construction, symmetric
from moe_ref.replicas import Placement

__all__ = ["Construction", "Density", "Placement", "asymmetric", "by_name", "max_density", "symmetric"]
