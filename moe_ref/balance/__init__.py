"""Token scheduling over expert replicas (FineMoE, sections 3 and 4)."""

from moe_ref.balance.agreement import check_same_plan
from moe_ref.balance.checks import SolverError
from moe_ref.balance.flow import ReplicaLoads
from moe_ref.balance.overlap import PlanWorker
from moe_ref.balance.plan import Plan
from moe_ref.balance.schedule import replica_loads, schedule

__all__ = ["Plan", "PlanWorker", "ReplicaLoads", "SolverError", "check_same_plan", "replica_loads", "schedule"]
