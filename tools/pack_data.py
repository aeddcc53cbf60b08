"""Make the packing plans of a run: which piece of which document stands in which row.

python tools/pack_data.py --config run.yaml --packing best_fit

All flags are the trainer's; plans lie beside the data sets, in PREFIX.packing/, and the trainer finds them there.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from megatron_ext.arguments import parse
from megatron_ext.config import Config
from megatron_ext.errors import UserError


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        config = parse(argv)
        pack(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def pack(config: Config) -> None:
    """Make the plans of the training split, and of the validation split where the run evaluates."""
    from megatron_ext.data.packing import build_plan, plan_folder, plan_key, report, save_plan
    from megatron_ext.engine.identity import vocabulary  # importing Megatron takes seconds
    from megatron_ext.engine.rows import splits

    data, vocab_size = config.data, vocabulary(config)
    if data.packing == "random":
        raise UserError("packing: got random, which needs no plan; name another policy")
    plain = replace(config, weighting=type(config.weighting)())
    for part in (0, 1) if config.training.eval_interval else (0,):
        for split in splits(plain, vocab_size, part):
            arguments = (data.packing, split.source, split.documents, data.seq_length, split.seed)
            folder = plan_folder(split.prefix, plan_key(*arguments))
            began = time.perf_counter()
            plan = build_plan(*arguments)
            if not folder.exists():
                save_plan(plan, folder)
            found = report(plan, split.source, split.documents)
            print(f"{folder}  ({time.perf_counter() - began:.1f} s)")
            print(f"  rows                 {found.rows:>15,} of {data.seq_length:,} tokens")
            print(f"  tokens kept          {found.kept_tokens:>15,} of {found.tokens:,}, {found.kept_share:.1%}")
            print(f"  documents truncated  {found.truncated_documents:>15,} of {found.documents:,}")
            print(f"  documents dropped    {found.dropped_documents:>15,}")
            print(f"  padding              {found.padding_tokens:>15,} tokens, {found.padding_share:.2%}")
            print(f"  keys a token may see {found.mean_context:>15,.0f} on average")
            for power, count in enumerate(found.context_histogram):
                if count:
                    low, share = 2**power, count / max(sum(found.context_histogram), 1)
                    print(f"    {low:>9,} to {2 * low - 1:>9,}  {share:6.1%}  {'#' * round(40 * share)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
