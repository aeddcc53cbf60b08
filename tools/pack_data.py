"""Make the packing plans of a run, which assign pieces of documents to rows.

python tools/pack_data.py --config run.yaml --packing best_fit
python tools/pack_data.py --config run.yaml --packing upsample_long --packing-options threshold=8192 factor=5
python tools/pack_data.py --config run.yaml --mixture mixture.yaml

python tools/pack_data.py --config run.yaml --packing best_fit --filter-by-gain SHARE SHORT LONG

The last one keeps the SHARE of the documents whose losses gain most from long context, by two stores of losses of the
rows of the same run without the filter: in a short context, and in whole rows. Train with filter_by_gain=SHARE among
the --packing-options.

All other flags are the trainer's; for a run in stages, all stages are packed, or only --stage. Plans are stored beside
the datasets, in PREFIX.packing/, where the trainer finds them.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_ext.cli import Parser, command
from megatron_ext.config import Config
from megatron_ext.config.arguments import parse_stages
from megatron_ext.data.packing.plan import PLAN, load_plan, plan_folder, save_plan
from megatron_ext.data.packing.policies import POLICIES, UNLIMITED, build_plan
from megatron_ext.data.packing.report import describe, describe_contexts, report
from megatron_ext.data.rows.packed import PackedRows
from megatron_ext.errors import UserError
from megatron_ext.run.identity import checked_vocab_size, row_identity
from megatron_ext.run.inputs import Split, open_split, splits
from megatron_ext.token_weighting.gain import Kept, document_gains, keep_by_gain
from megatron_ext.token_weighting.store import ScoreStore


@command
def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        print("Options of the policies, with their defaults:")
        for policy, kind in POLICIES.items():
            options = kind().options.items()
            words = (f"{name}={'(no limit)' if value == UNLIMITED else f'{value:g}'}" for name, value in options)
            print(f"  {policy:<15} {' '.join(words)}".rstrip())
        return 0
    parser = Parser()
    parser.add_argument("--filter-by-gain", nargs=3, metavar=("SHARE", "SHORT", "LONG"))
    options, flags = parser.parse_known_args(argv)
    pack([stage.config for stage in parse_stages(flags)], options.filter_by_gain)
    return 0


def pack(configs: Sequence[Config], filtered: Sequence[str] | None = None) -> None:
    """Make the plans of all stages: of the training split, and of the validation split if it needs plans.

    `filtered`: a share, and the stores of losses in a short context and in whole rows, that choose training documents.
    """
    planned = [config for config in configs if any(part.packing != "random" for part in config.data.parts)]
    if not planned:
        raise UserError("packing: got random, which needs no plan; name another policy")
    for config in planned:
        vocab_size = checked_vocab_size(config)
        plain = replace(config, weighting=type(config.weighting)())
        for number in (0, 1) if config.training.eval_interval else (0,):
            for split in splits(plain, vocab_size, number):
                if number == 0 and filtered is not None:
                    _make_filtered(plain, vocab_size, split, *filtered)
                elif split.part.packing != "random":
                    _make(split, ("training", "validation")[number])


def _make_filtered(config: Config, vocab_size: int, split: Split, share: str, short: str, long: str) -> None:
    """Make the plan of the documents with the highest gains."""
    data, part, length, first = config.data, split.part.unfiltered(), config.data.seq_length, config.data.first_sample
    if len(data.parts) > 1 or split.length != length:
        raise UserError("filter_by_gain: got a mixture or sequences shorter than rows, needs one dataset of whole rows")
    kept = replace(split, part=replace(part, packing_options=(*part.packing_options, f"filter_by_gain={share}")))
    kept.plan_key()  # refuses an invalid share
    rows = open_split(replace(split, part=part), config)
    assert isinstance(rows, PackedRows)
    of_rows = replace(data, data_path=(), mixture=(part,), packing="random", packing_options=(), long_share=None)
    identity: dict[str, Any] = row_identity(replace(config, data=of_rows), vocab_size)
    before = ScoreStore.open(short, first=first, **identity)
    if before.identity.short_context >= length:
        raise UserError(f"score store {short}: its losses are those of whole rows; name the short-context store first")
    identity |= {"rows": before.identity.rows, "model": before.identity.model}
    after = ScoreStore.open(long, first=first, short_context=length, short_stride=length, **identity)
    gains = document_gains(rows, before, after, first)
    _make(kept, "training", keep_by_gain(kept.part.options["filter_by_gain"], gains, split.documents, before, after))


def _make(split: Split, documents: str, kept: Kept | None = None) -> None:
    """Make a plan if missing, and report on it; `documents` describes the documents, of which some may be `kept`."""
    began = time.perf_counter()
    key, prefix = split.plan_key(), split.part.prefix
    if kept is None and "filter_by_gain" in key.options:
        raise UserError("filter_by_gain: needs scores; give --filter-by-gain SHARE SHORT LONG")
    chosen, record = (split.documents, {}) if kept is None else (kept.documents, {"filter": kept.record})
    folder = plan_folder(prefix, key)
    try:
        plan = load_plan(prefix, key)
    except UserError:  # missing or damaged
        try:
            plan = build_plan(key.policy, split.source, chosen, split.length, split.seed, split.part.options)
        except UserError as error:
            raise UserError(f"{prefix}, {documents} documents: {error}") from None
        save_plan(replace(plan, key=key), prefix, record)
    print(f"{folder}  ({time.perf_counter() - began:.1f} s)")
    if kept is not None:
        if json.loads((folder / PLAN).read_text())["filter"] != kept.record:
            raise UserError(f"filter_by_gain: {folder} was made with other scores; delete it, then pack again")
        print(kept)
    made = report(plan, split.source, split.documents)
    print(describe({key.policy: made}))
    print(describe_contexts(made))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
