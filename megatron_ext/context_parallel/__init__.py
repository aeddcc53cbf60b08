"""Plan which context-parallel rank holds which tokens, and which keys and values it fetches from the others."""

from megatron_ext.context_parallel.assignment import Policy
from megatron_ext.context_parallel.exchange_plan import PAIRS_PER_ROW, CPPlan, RankPlan, plan

__all__ = ["PAIRS_PER_ROW", "CPPlan", "Policy", "RankPlan", "plan"]
