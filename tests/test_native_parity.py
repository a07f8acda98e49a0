"""The MTP module that a target ships: begun with the target's own tensors, it computes what vLLM computes with them, and an export of
it untrained is those tensors again, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import SPEC, plugin_installed, refused
from safetensors.torch import load_file, save_file
from test_engine import config, sequences, take, write_responses
from test_parity import check, probed

from data.builtin import build_tiny, build_tiny_glm4_moe
from data.target import frozen, spec, tensors
from eval.export import export_head, read_export
from heads import build

NATIVE = {"_target_": "heads.mtp_native.NativeMTP"}
BUILDERS = {"mimo": partial(build_tiny, mimo=True), "glm4_moe": build_tiny_glm4_moe}
MODULES = {"mimo": "model.mtp_layers.0.", "glm4_moe": "model.layers.2."}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's embedding and lm_head, in whose place the engine puts those
FLOAT32 = "e_score_correction_bias"


def begun(target_dir: Path):
    """The head as a new run begins it (train/setup.py)."""
    head, parts = build(NATIVE, spec(target_dir)), frozen(target_dir, torch.float32, "cpu")
    own = tensors(target_dir, head.begins_as.values())
    head.load_state_dict({ours: own[theirs] for ours, theirs in head.begins_as.items()})
    head.attach(parts)
    return head.eval(), parts


@pytest.fixture(scope="module", params=BUILDERS)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def native(family, tmp_path_factory) -> Path:
    return BUILDERS[family](tmp_path_factory.mktemp(family) / "target")


def test_an_untrained_export_is_the_targets_module_bit_for_bit(native, family, tmp_path):
    stored = load_file(native / "model.safetensors")
    for name in stored:
        if not name.endswith(FLOAT32):
            stored[name] = stored[name].bfloat16()
    target_dir = tmp_path / "target"
    target_dir.mkdir()
    (target_dir / "config.json").write_text((native / "config.json").read_text())
    save_file(stored, target_dir / "model.safetensors")
    head, parts = begun(target_dir)
    out = export_head(
        head, parts, target_dir, tmp_path / "out", dtype=torch.bfloat16, head_cfg=NATIVE, k=3, provenance={"checkpoint": "step-000000"}
    )
    module = {name: tensor for name, tensor in stored.items() if name.startswith(MODULES[family]) and not name.endswith(COPIES)}
    written = load_file(out / "model.safetensors")
    assert written.keys() == module.keys() and all(torch.equal(written[name], module[name]) for name in module)
    assert all(written[name].dtype == module[name].dtype for name in module)
    assert read_export(out)["serving"]["method"] == "mtp"


def test_a_family_that_is_not_known_and_a_target_without_its_module_are_refused(native, family, tmp_path):
    known = "MiMoForCausalLM, Glm4MoeForCausalLM"
    with pytest.raises(ValueError, match=rf"knows that of {known}; this target is a DeepseekV3ForCausalLM.*head=mtp"):
        build(NATIVE, dataclasses.replace(SPEC, architecture="DeepseekV3ForCausalLM"))
    stored = load_file(native / "model.safetensors")
    save_file({name: x for name, x in stored.items() if not name.startswith(MODULES[family])}, tmp_path / "model.safetensors")
    names = build(NATIVE, spec(native)).begins_as.values()
    refused(lambda: tensors(tmp_path, names), f"no tensor {MODULES[family]}", "another head")
    name = f"{MODULES[family]}mlp.shared_experts.up_proj.weight" if family == "glm4_moe" else f"{MODULES[family]}mlp.up_proj.weight"
    save_file(stored | {name: stored[name].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    refused(lambda: tensors(tmp_path, names), name, "float8", "not quantised")


@pytest.fixture(scope="module")
def probe(family, tmp_path_factory):
    return probed(tmp_path_factory.mktemp("parity"), {"native": NATIVE}, build_target=BUILDERS[family])


def test_logits_and_drafts_equal_vllms(probe):
    check(probe, "native")


def test_states_of_such_a_target_can_be_captured(native, tmp_path, monkeypatch):
    """vLLM's own class of it hands out no residual streams, and the state after the last layer is what the module reads."""
    monkeypatch.setenv("PYTHONPATH", str(plugin_installed(tmp_path)))
    responses, store = write_responses(tmp_path / "answers.jsonl", 1, 20, 12), tmp_path / "store"
    take(native, responses, store, taps=(0, 1, 2))
    item = sequences(store, (0, 1, 2))["r0#0"]
    assert config(native, "float32").model and json.loads((store / "manifest.json").read_text())["taps"] == [0, 1, 2]
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(native, dtype=torch.float32).eval()
        seen: list[torch.Tensor] = []
        model.model.norm.register_forward_hook(lambda _module, inputs, output: seen.extend([inputs[0][0], output[0]]))
        streams = model(item["token_ids"].long()[None], output_hidden_states=True).hidden_states
    expected = torch.stack([streams[0][0], streams[1][0], seen[0]], 1)
    torch.testing.assert_close(item["taps"], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(item["last"], seen[1], rtol=1e-4, atol=1e-4)
