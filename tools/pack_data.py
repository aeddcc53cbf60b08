"""Make the packing plans of a run, which assign pieces of documents to rows.

python tools/pack_data.py --config run.yaml --packing best_fit
python tools/pack_data.py --config run.yaml --packing upsample_long --packing-options threshold=8192 factor=5
python tools/pack_data.py --config run.yaml --mixture mixture.yaml

python tools/pack_data.py --config run.yaml --packing best_fit --filter-by-gain SHARE SHORT LONG

The last one keeps the SHARE of documents that gain most from long context, by stores of losses of the same rows in a
short context and in whole rows. Train with filter_by_gain=SHARE among the --packing-options.

All other flags are the trainer's; for a run in stages, all stages are packed, or only --stage. Plans are stored beside
the datasets, in PREFIX.packing/, where the trainer finds them.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_ext.cli import Parser, command
from megatron_ext.config import Config
from megatron_ext.config.arguments import parse_stages
from megatron_ext.data.indexed import Documents
from megatron_ext.data.packing.plan import PLAN, load_plan, plan_folder, save_plan
from megatron_ext.data.packing.policies import POLICIES, UNLIMITED, build_plan
from megatron_ext.data.packing.report import describe, report
from megatron_ext.errors import UserError

if TYPE_CHECKING:
    from megatron_ext.run.inputs import Split


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
    """Make the plans of all stages, for training and if needed for validation; `filtered` is SHARE, SHORT and LONG."""
    from megatron_ext.run.identity import checked_vocab_size  # importing torch takes seconds
    from megatron_ext.run.inputs import splits

    planned = [config for config in configs if any(part.packing != "random" for part in config.data.parts)]
    if not planned:
        raise UserError("packing: got random, which needs no plan; name another policy")
    for config in planned:
        vocab_size = checked_vocab_size(config)
        plain = replace(config, weighting=type(config.weighting)())
        for split in splits(plain, vocab_size, 0):
            if filtered is not None:
                _make_filtered(plain, vocab_size, split, *filtered)
            elif split.part.packing != "random":
                _make(split, "training")
        if config.training.eval_interval:
            for split in splits(plain, vocab_size, 1):
                if split.part.packing != "random":
                    _make(split, "validation")


def _make_filtered(config: Config, vocab_size: int, split: "Split", share: str, short: str, long: str) -> None:
    from megatron_ext.run.identity import row_identity
    from megatron_ext.run.inputs import open_split
    from megatron_ext.token_weighting.gain import document_gains, keep_by_gain
    from megatron_ext.token_weighting.store import ScoreStore

    data = config.data
    part = split.part.unfiltered()
    length = data.seq_length
    if len(data.parts) > 1 or split.length != length:
        raise UserError("filter_by_gain: got a mixture or sequences shorter than rows, needs one dataset of whole rows")
    filtered = replace(split, part=replace(part, packing_options=(*part.packing_options, f"filter_by_gain={share}")))
    filtered.plan_key()  # refuses an invalid share
    of_rows = replace(data, data_path=(), mixture=(part,), packing="random", packing_options=(), long_share=None)
    identity = row_identity(replace(config, data=of_rows), vocab_size)
    short_store = ScoreStore.open(short, first=data.first_sample, **identity)
    if short_store.identity.short_context >= length:
        raise UserError(f"score store {short}: it has losses in whole rows; name the short-context store first")
    identity |= {"rows": short_store.identity.rows, "model": short_store.identity.model}
    long_store = ScoreStore.open(long, first=data.first_sample, short_context=length, short_stride=length, **identity)
    rows = open_split(replace(split, part=part), config)
    gains = document_gains(rows, short_store, long_store, data.first_sample)
    chosen = keep_by_gain(filtered.part.options["filter_by_gain"], gains, split.documents)
    record = {
        "documents": len(split.documents),
        "with_scores": int(np.isfinite(gains[split.documents]).sum()),
        "kept": len(chosen),
        "least_gain": float(gains[chosen].min(initial=np.inf)),
        "short": asdict(short_store.identity),
        "long": asdict(long_store.identity),
    }
    _make(filtered, "training", chosen, record)


def _make(split: "Split", documents: str, kept: Documents | None = None, record: dict | None = None) -> None:
    """Make a plan if missing, and report on it; `documents` describes the documents, of which some may be `kept`."""
    began = time.perf_counter()
    key = split.plan_key()
    prefix = split.part.prefix
    folder = plan_folder(prefix, key)
    chosen = split.documents if kept is None else kept
    try:
        plan = load_plan(prefix, key)
    except UserError:  # missing or damaged
        if kept is None and "filter_by_gain" in key.options:
            raise UserError("filter_by_gain: needs scores; give --filter-by-gain SHARE SHORT LONG") from None
        try:
            plan = build_plan(key.policy, split.source, chosen, split.length, split.seed, split.part.options)
        except UserError as error:
            raise UserError(f"{prefix}, {documents} documents: {error}") from None
        save_plan(replace(plan, key=key), prefix, {"filter": record} if record else {})
    print(f"{folder}  ({time.perf_counter() - began:.1f} s)")
    if record:
        if json.loads((folder / PLAN).read_text())["filter"] != record:
            raise UserError(f"filter_by_gain: {folder} was made with other scores; delete it, then pack again")
        print("kept {kept:,} of {with_scores:,} documents with scores; least gain {least_gain:.3g}".format(**record))
    print(describe({key.policy: report(plan, split.source, split.documents)}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
