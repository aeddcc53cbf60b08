"""Compare transformers' AutoTokenizer with the ids of training, and make an export's give them.

For many models transformers builds a tokenizer of its own class from the vocabulary and the merges, and reads neither
the normalizer nor the splitting of tokenizer.json. The class PreTrainedTokenizerFast reads all of the file.
"""

import json
import logging
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from megatron_ext.data.text.tokenizer import HF_CONFIG, HF_FILE, Tokenizer, read_beside
from megatron_ext.errors import UserError, library_errors

logger = logging.getLogger(__name__)
WHOLE_FILE = "PreTrainedTokenizerFast"
# what normalizers and splitting treat in different ways
TEXTS = (
    *("It's 2024, DON'T", " a space before", "two  spaces", "  def f(x):\n\n\n    return x\r\n", "tab\tend\n"),
    *("1234567 12 345", "cafe\u0301 caf\u00e9", "\u2581x", "\u4f60\u597d\uff0c\u4e16\u754c", "\U0001f600\u200d"),
)


def match_training(folder: Path) -> None:
    """Name the class in a model folder's tokenizer_config.json that gives the ids of its tokenizer.json.

    Nothing is written if AutoTokenizer gives them already. Logs a warning if it does not with this class either, or if
    transformers is not installed.
    """
    if not (folder / HF_FILE).is_file():
        return
    if find_spec("transformers") is None:
        logger.warning("tokenizer: not compared with AutoTokenizer's ids, as transformers is not installed")
        return
    try:
        ours = Tokenizer(folder)
    except UserError as error:
        logger.warning("%s; its ids are not compared with AutoTokenizer's", error)
        return
    if _difference(folder, ours) is None:
        return
    file = folder / HF_CONFIG
    before = None
    if file.exists():
        before = file.read_bytes()
    entries = read_beside(folder / HF_FILE, HF_CONFIG) | {"tokenizer_class": WHOLE_FILE}
    file.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    difference = _difference(folder, ours)
    if difference is None:
        return
    if before is None:
        file.unlink()
    else:
        file.write_bytes(before)
    logger.warning(
        "tokenizer: transformers' AutoTokenizer gives %s, not the ids of training; load the export's tokenizer with %s",
        *(difference, WHOLE_FILE),
    )


def warn_of_other_ids(ours: Tokenizer) -> None:
    """Log a warning if AutoTokenizer gives other ids than `ours`, which was read from a folder; it imports torch."""
    difference = _difference(ours.file.parent, ours)
    if difference is not None:
        logger.warning(
            "tokenizer: transformers' AutoTokenizer gives %s; the data set has the ids of %s. If the model was trained "
            "with AutoTokenizer's ids, give a tokenizer.json that has the same",
            *(difference, ours.file),
        )


def _difference(folder: Path, ours: Tokenizer) -> str | None:
    """Return how AutoTokenizer's ids of some text differ, if they do."""
    from transformers import AutoTokenizer

    special = next(iter(ours.special.values()), "")
    expected: dict[str, list[int]] = {}
    for text in (*TEXTS, f"a{special}b{special} c"):
        with suppress(UserError):  # not every tokenizer encodes every text
            expected[text], _ = ours.encode_spelled(text)
    try:
        with library_errors(UserError):
            theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            ids_by_text = {text: theirs.encode(text, add_special_tokens=False) for text in expected}
    except UserError as error:
        return f"an error ({error})"
    for text, ids in ids_by_text.items():
        if ids != expected[text]:
            return f"{ids} for {text!r} instead of {expected[text]}"
    return None
