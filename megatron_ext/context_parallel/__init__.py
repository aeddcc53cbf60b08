"""Which context-parallel rank holds which tokens, and which keys and values it fetches from the others."""

from megatron_ext.context_parallel.assignment import Policy
from megatron_ext.context_parallel.exchange_plan import CPPlan, RankPlan, plan

__all__ = ["CPPlan", "Policy", "RankPlan", "plan"]
