"""Read from a run's data sets the vocabulary, the BOS token, and what identifies its rows."""

from pathlib import Path
from typing import Any

from megatron_ext.config import Config
from megatron_ext.config.effective import effective
from megatron_ext.data.indexed import SOURCES, read_metadata
from megatron_ext.data.text.tokenizer import Tokenizer, vocabulary_size
from megatron_ext.errors import UserError
from megatron_ext.files.fingerprint import file_edges, fingerprint
from megatron_ext.launch import is_first
from megatron_ext.token_weighting.store import ScoreStore


def checked_vocab_size(config: Config) -> int:
    """Return V; raise UserError unless all data sets were created with the run's tokenizer, by their metadata."""
    path = config.data.tokenizer_model
    if path is None:
        return vocabulary_size(config.model.vocab_size, None)
    tokenizer = Tokenizer(path)
    for prefix in dict.fromkeys(part.prefix for part in (*config.data.parts, *config.data.valid_parts)):
        metadata = read_metadata(prefix)
        if metadata.get("tokenizer_fingerprint") not in (None, tokenizer.fingerprint):
            raise UserError(
                f"{prefix} was made with another tokenizer ({metadata.get('tokenizer')}, fingerprint "
                f"{metadata['tokenizer_fingerprint'][:12]}) than {path} (fingerprint {tokenizer.fingerprint[:12]}); "
                "use the one it was made with, or make the dataset again"
            )
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    return tokenizer.vocab_size


def bos_of(config: Config) -> int | None:
    """Return the token (BOS) that documents begin with, by the metadata; None if no data set has one."""
    prefix_by_bos = {read_metadata(part.prefix).get("bos_id"): part.prefix for part in config.data.parts}
    prefix_by_bos.pop(None, None)
    if len(prefix_by_bos) > 1:
        listed = ", ".join(f"{prefix} with {bos}" for bos, prefix in prefix_by_bos.items())
        raise UserError(
            f"data: documents begin with different tokens ({listed}); make the data sets with one --bos-token"
        )
    return next(iter(prefix_by_bos), None)


def row_identity(config: Config, vocab_size: int) -> dict[str, int | str]:
    """Return the fields of `StoreIdentity` that identify a run's rows: training must read the same rows as scoring.

    Weights and shares are the effective ones, as when a run resumes: 1 a 1 b packs like 2 a 2 b.
    """
    data = effective(config).data
    content: list[str | bytes | Path] = []
    for part in data.mixture:
        # the index, and size and both ends of the tokens; reading terabytes would add little
        content += [Path(f"{part.prefix}.idx"), *file_edges(f"{part.prefix}.bin")]
        sources = Path(f"{part.prefix}{SOURCES}")  # used by upsampling
        if sources.is_file():
            content.append(sources)
    packing = (
        f"{' '.join((repr(part.weight), 'x', part.packing, *part.packing_options))} of {part.length}"
        for part in data.mixture
    )
    mask = "across documents"
    if config.window.document_mask:
        mask = "inside documents"
    tokenizer = "none"
    if data.tokenizer_model:
        tokenizer = Tokenizer(data.tokenizer_model).fingerprint
    return {
        "row_length": data.seq_length,
        "seed": config.training.seed,
        "vocab_size": vocab_size,
        "data": fingerprint(*content),
        "packing": f"{', '.join(packing)}, split {data.split}, {mask}",
        "tokenizer": tokenizer,
    }


def open_scores(config: Config, vocab_size: int, end: int) -> ScoreStore | None:
    """Open the store of a frozen scorer, if the run uses one; `end` is the sample after the run's last.

    Rank 0 alone checks the store, for which it reads the data sets' `.idx` files and lists the store's folder.
    """
    path = config.weighting.score_store
    if path is None:
        return None
    if not is_first():
        return ScoreStore(Path(path), "r")
    identity: dict[str, Any] = row_identity(config, vocab_size)
    store = ScoreStore.open(path, first=config.data.first_sample, rows=end, **identity)
    length = config.data.seq_length
    needs = None
    if config.weighting.weight_score == "rho1":
        if store.identity.short_context < length:
            needs = f"whole rows, --context {length}"
    elif store.identity.short_context >= length:
        needs = f"a --context below seq_length {length}"
    if needs is not None:
        raise UserError(
            f"score store {path}: its losses are in a context of {store.identity.short_context}, but weight_score "
            f"{config.weighting.weight_score} needs {needs}; score again"
        )
    return store


def data_fingerprints(config: Config) -> list[str]:
    """Return a fingerprint of each of `config.data.parts`, in order."""
    return [data_fingerprint(part.prefix) for part in config.data.parts]


def data_fingerprint(prefix: str) -> str:
    """Return a fingerprint of a data set, from the sizes and both ends of its files."""
    return fingerprint(*file_edges(f"{prefix}.idx"), *file_edges(f"{prefix}.bin"))
