"""Which tokens of a conversation are the assistant's, and the tokenizer of a worker."""

from __future__ import annotations

import pytest

from megatron_ext.data.build.encode import load_tokenizer
from megatron_ext.errors import UserError


def test_a_tokenizer_that_has_changed_is_refused() -> None:
    with pytest.raises(UserError, match="tokenizer: bytes has changed since the work began; start again"):
        load_tokenizer("bytes", "other fingerprint")
