"""Make the packing plans of a run, which assign pieces of documents to rows.

python tools/pack_data.py --config run.yaml --packing best_fit
python tools/pack_data.py --config run.yaml --packing upsample_long --packing-options threshold=8192 factor=5
python tools/pack_data.py --config run.yaml --mixture mixture.yaml

All flags are the trainer's; for a run in stages, all stages are packed, or only --stage. Plans are stored beside the
datasets, in PREFIX.packing/, where the trainer finds them.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from megatron_ext.cli import command
from megatron_ext.config import Config
from megatron_ext.config.arguments import parse_stages
from megatron_ext.data.packing.plan import load_plan, plan_folder, save_plan
from megatron_ext.data.packing.policies import POLICIES, UNLIMITED, build_plan
from megatron_ext.data.packing.report import describe, describe_contexts, report
from megatron_ext.errors import UserError
from megatron_ext.run.identity import checked_vocab_size
from megatron_ext.run.inputs import Split, splits


@command
def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        print("Options of the policies, with their defaults:")
        for policy, kind in POLICIES.items():
            options = asdict(kind()).items()
            words = (f"{name}={'(no limit)' if value == UNLIMITED else f'{value:g}'}" for name, value in options)
            print(f"  {policy:<15} {' '.join(words)}".rstrip())
        return 0
    pack([stage.config for stage in parse_stages(argv)])
    return 0


def pack(configs: Sequence[Config]) -> None:
    """Make the plans of all stages: of the training split, and of the validation split if it needs plans."""
    planned = [config for config in configs if any(part.packing != "random" for part in config.data.parts)]
    if not planned:
        raise UserError("packing: got random, which needs no plan; name another policy")
    for config in planned:
        vocab_size = checked_vocab_size(config)
        plain = replace(config, weighting=type(config.weighting)())
        for number in (0, 1) if config.training.eval_interval else (0,):
            for split in splits(plain, vocab_size, number):
                if split.part.packing != "random":
                    _make(split, ("training", "validation")[number])


def _make(split: Split, documents: str) -> None:
    """Make a plan if missing, and report on it; `documents` describes the documents."""
    began = time.perf_counter()
    key, prefix = split.plan_key(), split.part.prefix
    try:
        plan = load_plan(prefix, key)
    except UserError:  # missing or damaged
        try:
            plan = build_plan(key.policy, split.source, split.documents, split.length, split.seed, split.part.options)
        except UserError as error:
            raise UserError(f"{prefix}, {documents} documents: {error}") from None
        save_plan(plan, prefix)
    print(f"{plan_folder(prefix, key)}  ({time.perf_counter() - began:.1f} s)")
    made = report(plan, split.source, split.documents)
    print(describe({key.policy: made}))
    print(describe_contexts(made))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
