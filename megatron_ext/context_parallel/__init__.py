"""Plan which context-parallel rank holds which tokens, and which keys and values it fetches from the others.

assignment     the tokens of each rank, by several policies      choice    the plan and the scheme of a run
exchange_plan  the keys that each rank needs from the others     group     the ranks that share a row
exchange       moves keys and values to queries, or tokens to heads
"""

from megatron_ext.context_parallel.assignment import Policy
from megatron_ext.context_parallel.exchange_plan import PAIRS_PER_ROW, CPPlan, RankPlan, plan

__all__ = ["PAIRS_PER_ROW", "CPPlan", "Policy", "RankPlan", "plan"]
