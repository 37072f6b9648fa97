"""Token scheduling over expert replicas (FineMoE, sections 3 and 4)."""

from moe_ref.balance.plan import Plan

__all__ = ["Plan"]
