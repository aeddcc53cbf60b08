"""examples/transformers_trainer.py: the Trainer's losses are those of our own trainer on the same rows and windows."""

import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("accelerate")  # transformers' Trainer needs it

from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
from transformers.modeling_flash_attention_utils import (
    FlashAttentionKwargs,
    _flash_attention_forward,
    prepare_fa_kwargs_from_position_ids,
)
from transformers.modeling_utils import AttentionInterface

from megatron_ext.data.row import TokenRow
from megatron_ext.schedule import build_schedule
from tests.conftest import ROOT, SmallData
from tests.launcher import TIMEOUT_S, clean_environment, torchrun
from tests.runs import Launched, RunResult, relative, weight_error

LENGTH = 128
STEPS = 4
ROWS = 8
RATE = 2.5e-4
SCHEDULE = build_schedule("linear", start=7, end=LENGTH, rate=41)  # 7, 48, 89, 128
TOLERANCE = 1e-5
WEIGHTS_APART = 2e-5
FLAGS = f"""
    --seq-length {LENGTH} --train-iters {STEPS} --global-batch-size {ROWS} --micro-batch-size 4 --document-mask
    --eod-mask-loss --window-start 7 --window-rate 41 --lr {RATE} --lr-decay-style constant --lr-warmup-iters 0
"""
WEIGHTED = "--token-weighting unfrozen --short-context 32"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_trainer", ROOT / "examples" / "transformers_trainer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def dumped_rows(run: RunResult) -> list[TokenRow]:
    """The rows of all steps, as the run has dumped them."""
    rows = []
    for step in range(STEPS):
        batch = dict(np.load(run.trajectory / f"step_{step:06d}.npz"))
        ends = np.split(batch["document_ends"], batch["document_ends_offsets"][1:-1])
        weights = batch.get("weights", [None] * ROWS)
        rows += map(TokenRow, batch["tokens"], ends, batch["loss_mask"], weights)
    return rows


def load_model(run: RunResult, folder: Path, attention: str) -> Any:
    """The run's initial model, in transformers."""
    folder.mkdir()
    (folder / "config.json").write_bytes((run.trajectory / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes((run.trajectory / "initial.safetensors").read_bytes())
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)


def train(example: ModuleType, run: RunResult, folder: Path, attention: str) -> Trainer:
    """Train the run's initial model on its rows."""
    options = json.loads((run.trajectory / "optimizer.json").read_text())
    training = TrainingArguments(
        folder / "trainer",
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=ROWS // 2,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=options["weight_decay"],
        adam_beta1=options["betas"][0],
        adam_beta2=options["betas"][1],
        adam_epsilon=options["eps"],
        max_grad_norm=options["clip_grad"],
        logging_steps=1,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        dataloader_num_workers=1,
    )
    rows = dumped_rows(run)
    trainer = Trainer(
        load_model(run, folder / "model", attention),
        training,
        data_collator=example.collate,
        train_dataset=example.WindowedRows(rows.__getitem__, SCHEDULE, ROWS, STEPS),
        compute_loss_func=example.weighted_loss if rows[0].weights is not None else None,
        callbacks=[example.WindowInLog(SCHEDULE)],
    )
    trainer.train()
    return trainer


def by_borders(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention inside the borders that flash attention would get, by the names of its real signature."""
    assert attention_mask is None
    layout = {"query_length": query.shape[2], "is_causal": True}
    bound = inspect.signature(_flash_attention_forward).bind(query, key, value, attention_mask, **layout, **options)
    named = bound.arguments
    torch.testing.assert_close(named["cu_seq_lens_q"], named["cu_seq_lens_k"], rtol=0, atol=0)
    lengths = named["cu_seq_lens_q"].diff().tolist()
    assert max(lengths) == named["max_length_q"] == named["max_length_k"]
    # of all rows laid end to end: [B, N, L, H] to [N, B L, H]
    flat = [x.transpose(0, 1).flatten(1, 2).split(lengths, dim=1) for x in (query, key, value)]
    segments = [
        F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        for q, k, v in zip(*flat, strict=True)
    ]
    out = torch.cat(segments, dim=1).unflatten(1, (len(query), -1))
    return out.permute(1, 2, 0, 3), None


AttentionInterface.register("by_borders", by_borders)


@pytest.mark.parametrize(
    ("attention", "weighting"), [("sdpa", ""), ("eager", ""), ("by_borders", ""), ("sdpa", WEIGHTED)]
)
def test_the_trainer_has_the_losses_and_weights_of_ours(
    example: ModuleType, launched: Launched, tmp_path: Path, attention: str, weighting: str
) -> None:
    """One process, four windows; a worker reads ahead of the steps."""
    launched_run = launched([*FLAGS.split(), *weighting.split()], 1)
    trainer = train(example, launched_run, tmp_path, attention)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["window"] for entry in log] == launched_run.series("window") == [7, 48, 89, 128]
    losses = relative([entry["loss"] for entry in log], launched_run.series("train_loss"))
    norms = relative([entry["grad_norm"] for entry in log], launched_run.series("grad_norm"))
    state = {name: tensor.detach().numpy() for name, tensor in trainer.model.state_dict().items()}
    weights, name = weight_error(launched_run.weights("final"), state)
    print(f"losses {losses:.1e}, gradient norms {norms:.1e}, weights {weights:.1e} ({name})")
    assert max(losses, norms) <= TOLERANCE
    assert weights <= WEIGHTS_APART
    assert (relative(launched_run.series("lm_loss"), launched_run.series("train_loss")) > 1e-3) == bool(weighting)


@pytest.fixture
def batch(example: ModuleType) -> dict[str, Any]:
    """Two rows of 24 tokens under a window of 10, with documents of one token and more."""
    draw = np.random.default_rng(0)
    ends = [[1, 2, 7, 24], [16]]
    rows = [
        TokenRow(draw.integers(0, 64, 25), np.array(document_ends), np.ones(24, dtype=bool)) for document_ends in ends
    ]
    schedule = build_schedule("constant", start=10, end=10)
    data = example.WindowedRows(rows.__getitem__, schedule, rows_per_step=2, steps=1)
    collated: dict[str, Any] = example.collate([data[0], data[1]])
    return collated


BORDERS = [0, 1, 2, 7, 10, 20, 24, 34, 40, 44, 48]  # of the batch, by hand: the second row begins at 24


@pytest.mark.parametrize("attention", ["sdpa", "eager", "by_borders"])
def test_a_token_changes_the_later_ones_of_its_segment_alone(batch: dict[str, Any], attention: str) -> None:
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape, attn_implementation=attention)
    inputs = {name: value for name, value in batch.items() if "labels" not in name} | {"use_cache": False}
    before = model(**inputs).logits.flatten(0, 1)
    for token in range(before.shape[0]):
        changed = inputs["input_ids"].flatten().clone()
        changed[token] = (changed[token] + 1) % 64
        after = model(**inputs | {"input_ids": changed.view(2, 24)}).logits.flatten(0, 1)
        reached = (after - before).abs().amax(1) > 1e-6
        end = next(border for border in BORDERS if border > token)
        assert reached.nonzero().flatten().tolist() == list(range(token, end)), token


def test_flash_attention_gets_what_transformers_finds_in_positions(batch: dict[str, Any]) -> None:
    """transformers' own function and its own names give the expected values."""
    borders, longest = prepare_fa_kwargs_from_position_ids(batch["position_ids"])
    expected = dict(zip(FlashAttentionKwargs.__annotations__, [*borders, *longest], strict=True))
    assert {name: torch.as_tensor(batch[name]).tolist() for name in expected} == {
        name: value.tolist() for name, value in expected.items()
    }
    assert borders[0].tolist() == BORDERS
    assert batch["cu_seq_lens_q"].dtype == borders[0].dtype
    inspect.signature(_flash_attention_forward).bind_partial(**expected)


def command(launched_from: RunResult, data: SmallData, output: Path, *flags: object) -> list[str]:
    """The example's flags for a short run from random weights."""
    text = f"""
        --model {launched_from.trajectory} --from-scratch --data-path {data.prefix} --seq-length 64 --window-rate 16
        --output_dir {output} --max_steps 4 --save_steps 2 --logging_steps 1 --use_cpu --report_to none
    """
    return [*text.split(), *map(str, flags)]


def log_of(output: Path) -> list[tuple[int, float, int]]:
    """The step, loss and window of each step of a run, from its last checkpoint."""
    state = json.loads((output / "checkpoint-4" / "trainer_state.json").read_text())
    return [(entry["step"], entry["loss"], entry["window"]) for entry in state["log_history"] if "loss" in entry]


WITHOUT_MEGATRON = """
import runpy, sys
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
found = [name for name in sys.modules if name.partition(".")[0] == "megatron"]
assert not found, found
"""
ALONE = ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2]


@pytest.fixture(scope="module")
def whole(launched: Launched, small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the script in a process that must not have imported Megatron."""
    output = tmp_path_factory.mktemp("whole")
    flags = command(launched(FLAGS.split(), 1), small_data, output, *ALONE)
    script = str(ROOT / "examples" / "transformers_trainer.py")
    subprocess.run([sys.executable, "-c", WITHOUT_MEGATRON, script, *flags], check=True, env=clean_environment())
    return output


def test_the_script_resumes_with_the_same_rows_and_windows(
    example: ModuleType, whole: Path, launched: Launched, small_data: SmallData, tmp_path: Path
) -> None:
    resume = ["--resume_from_checkpoint", whole / "checkpoint-2"]
    example.main(command(launched(FLAGS.split(), 1), small_data, tmp_path, *ALONE, *resume))
    assert [window for _, _, window in log_of(whole)] == [32, 48, 64, 64]
    assert np.array(log_of(tmp_path)) == pytest.approx(np.array(log_of(whole)), rel=1e-6)


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(
    whole: Path, launched: Launched, small_data: SmallData, tmp_path: Path
) -> None:
    flags = command(launched(FLAGS.split(), 1), small_data, tmp_path, "--per_device_train_batch_size", 2)
    running = torchrun(2, "examples/transformers_trainer.py", *flags)
    (done,) = running.finish(TIMEOUT_S)
    assert done.status == 0, running.words()
    assert np.array(log_of(tmp_path)) == pytest.approx(np.array(log_of(whole)), rel=1e-5)
