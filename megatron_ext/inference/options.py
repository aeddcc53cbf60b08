"""The options of the commands that use trained models; tools/ has their flags, with the meanings."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, Self

Dtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is loaded, and its texts are encoded."""

    tokenizer: str | None
    eod_token: str | None
    bos: bool
    dtype: Dtype

    @classmethod
    def of(cls, flags: argparse.Namespace) -> Self:
        """Take these options from the parsed flags, which may have others too."""
        return cls(**{field.name: getattr(flags, field.name) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    model: Path
    prompt: Sequence[str] | None
    input: Sequence[str] | None
    json_key: str
    chat: bool
    system: str | None
    max_new_tokens: int
    batch_size: int
    output: Path | None


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelOptions):
    command: str
    models: Sequence[Path]


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(EvaluateOptions):
    input: Sequence[str] | None
    json_key: str
    source_key: str | None
    data_path: Sequence[str] | None
    lengths: Sequence[int] | None
    stride: int | None
    document_mask: bool
    documents: int | None
    documents_per_source: int | None
    min_tokens: int
    max_tokens: int | None
    batch_tokens: int


@dataclass(frozen=True, kw_only=True)
class LmEvalOptions(EvaluateOptions):
    tasks: Sequence[str]
    shots: int | None
    limit: int | None
    include_path: Path | None
    lengths: Sequence[int] | None
    max_length: int | None
    cut_middle: bool
    split_length: int | None
    chat: bool
    batch_size: int
