"""Assignment of pieces of documents to rows: policies create plans offline, `PackedRows` reads them."""

from megatron_ext.data.packing.plan import PackingPlan, PlanKey, load_plan, plan_folder, save_plan
from megatron_ext.data.packing.policies import POLICIES, UNLIMITED, build_plan, plan_key
from megatron_ext.data.packing.report import describe, describe_contexts, report
from megatron_ext.data.packing.rows import PackedRows

__all__ = [
    "POLICIES",
    "UNLIMITED",
    "PackedRows",
    "PackingPlan",
    "PlanKey",
    "build_plan",
    "describe",
    "describe_contexts",
    "load_plan",
    "plan_folder",
    "plan_key",
    "report",
    "save_plan",
]
