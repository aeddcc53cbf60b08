"""Muon trains the same model under every layout, and continues under another one from states of its own names.

With Newton-Schulz iterations in fp32, twenty steps agree to 1e-6 as with AdamW. The iterations multiply small singular
values by up to 493, and by default their products are in bf16, with 8 bits: rounding of the gradients in another order
then changes the updates by some 1e-3 and the losses by some 1e-5, with experts, whose choice it changes, by some 1e-4.
Megatron's default for tensor parallelism, another algorithm, changes them by 6e-3.
"""

import json

import numpy as np
import pytest

from megatron_ext.checkpoint.tensors import Stored
from megatron_ext.engine import compat
from megatron_ext.errors import UserError
from tests.conftest import slow_but
from tests.parity.test_layouts import CP2, EP2, LATENT, MIXTRAL, PP2, TIED, TP2, TP2_SP, VPP2, Layout
from tests.runs import Launched, RunResult, relative, weight_error

try:
    compat.check_muon()
except UserError as missing:
    pytest.skip(str(missing), allow_module_level=True)

STEPS = 20
SAVED = 8
COMMON = f"""--optimizer muon --muon-extra-scale-factor 0.2 --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 2 --clip-grad 0.5
    --lr-decay-iters {STEPS} --seq-length 64 --window-start 7 --window-rate 5 --document-mask""".split()
FP32 = "--muon-fp32-matmul-prec highest"
LAYOUTS = {
    "dp2": Layout("--overlap-grad-reduce", 2),
    "pp2": Layout(PP2, 2),
    "tp2 sp": Layout(TP2_SP, 2),
    "cp2": Layout(CP2, 2),
    "pp2 vpp2 tied": Layout(VPP2, 2, TIED),
    "latent tp2": Layout(TP2, 2, LATENT),
    "bf16 tp2 sp": Layout(TP2_SP, 2, "--bf16"),
    "mixtral ep2": Layout(EP2, 2, MIXTRAL),
    "mixtral tp2 sp ep2": Layout(f"{TP2_SP} {EP2}", 4, MIXTRAL),
}


def trained(launched: Launched, flags: str, processes: int = 1, steps: int = STEPS) -> RunResult:
    return launched([*COMMON, *flags.split(), "--train-iters", steps], processes)


CASES = [*((name, FP32) for name in LAYOUTS), ("tp2 sp", ""), ("mixtral ep2", "")]


@pytest.mark.parametrize(("name", "precision"), slow_but([("tp2 sp", FP32), ("mixtral ep2", "")], CASES))
def test_a_layout_trains_the_same_model(launched: Launched, name: str, precision: str) -> None:
    layout = LAYOUTS[name]
    reference = trained(launched, f"{layout.model} {precision}")
    run = trained(launched, f"{layout.flags} {layout.model} {precision}", layout.processes)
    errors = {key: relative(run.series(key), reference.series(key)) for key in ("lm_loss", "grad_norm")}
    errors["weights"], worst = weight_error(run.weights("final"), reference.weights("final"))
    assert run.series("grad_norm")[0] > 0.5  # gradients are clipped
    rounding = 2e-3 if layout.model == "--bf16" else 1e-6 if precision else 2e-3 if layout.model == MIXTRAL else 1e-4
    # Adam's steps of an embedding with nearly no gradient follow its rounding
    limits = {"lm_loss": rounding, "grad_norm": 10 * rounding, "weights": 100 * rounding}
    assert all(errors[key] <= limit for key, limit in limits.items()), (errors, worst)


@pytest.mark.parametrize("flags", slow_but([""], ["", TP2]))
def test_the_first_update_is_orthogonal_matrix_by_matrix(launched: Launched, flags: str) -> None:
    """Queries, keys and values are three matrices, which Megatron interleaves by group; gate and up are one."""

    def added(more: str, *names: str) -> list[float]:
        """The singular values of what the first step adds, over the factor of its length: all but the outer tenths."""
        options = f"--lr-warmup-iters 0 --weight-decay 0 {FP32} {flags} {more}"
        run = trained(launched, options, 2 if flags else 1, steps=1)
        weights = [f"model.layers.1.{name}.weight" for name in names]
        before, after = (np.concatenate([run.weights(when)[name] for name in weights]) for when in ("initial", "final"))
        values = np.linalg.svd(before - after, compute_uv=False) / (2e-3 * 0.2 * max(before.shape) ** 0.5)
        return list(np.percentile(values, [10, 90]))

    queries_keys_values = [f"self_attn.{name}_proj" for name in "qkv"]
    gate_up = ["mlp.gate_proj", "mlp.up_proj"]
    fused = "--no-muon-split-qkv"
    for names in (*([name] for name in queries_keys_values), ["self_attn.o_proj"], gate_up, ["mlp.down_proj"]):
        assert added("", *names) == pytest.approx([1, 1], abs=0.15), names
    assert added(fused, *queries_keys_values) == pytest.approx([1, 1], abs=0.15)
    for name in queries_keys_values:
        assert added(fused, name) != pytest.approx([1, 1], abs=0.15), name


CONTINUED = [("tp2 sp", "pp2", FP32), ("dp2", "tp2 sp", FP32), ("pp2", "pp2", "--bf16")]
CONTINUED += [("mixtral ep2", "mixtral tp2 sp ep2", f"{MIXTRAL} {FP32}")]


@pytest.mark.parametrize(("source", "target", "flags"), slow_but(CONTINUED[:1], CONTINUED))
def test_a_run_continues_under_another_layout(launched: Launched, source: str, target: str, flags: str) -> None:
    """It is equal bit for bit under the same layout, and to rounding under another one."""
    begun = trained(launched, f"{LAYOUTS[source].flags} {flags}", LAYOUTS[source].processes, SAVED)
    whole, resumed = (
        trained(launched, f"{LAYOUTS[target].flags} {flags} {more}", LAYOUTS[target].processes)
        for more in ("", f"--load {begun.folder}")
    )
    for key in ("lm_loss", "grad_norm"):
        assert relative(resumed.series(key), whole.series(key)[SAVED:]) <= (0 if source == target else 1e-6), key


@pytest.mark.parametrize("flags", slow_but([""], ["", f"{MIXTRAL} --bf16"]))
def test_states_are_saved_under_their_own_names(launched: Launched, flags: str) -> None:
    run = trained(launched, f"{flags} {PP2}", 2, SAVED)
    (folder,) = (run.folder / "checkpoints").glob("iter_*")
    shapes = {name: tensor.shape for name, tensor in Stored(folder).tensors.items()}
    weights = {name for name in shapes if not name.startswith(("optimizer.", "random_states."))}
    assert any("linear_qkv" in name for name in weights)
    matrices = {name for name in weights if len(shapes[name]) == 2 and "embedding" not in name and "output" not in name}
    expected = {f"momentum_buffer.{name}" for name in matrices}
    expected |= {f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in weights - matrices}
    expected |= {f"fp32_param.{name}" for name in weights} if "--bf16" in flags else set()
    assert {name for name in shapes if name.startswith("optimizer.")} == {
        f"optimizer.state.{state}" for state in expected
    }
    assert json.loads((folder / "manifest.json").read_text())["optimizer"] == {"step": SAVED}
