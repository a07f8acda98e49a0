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

from data.builtin import build_tiny
from data.target import frozen, spec, tensors
from eval.export import export_head, read_export
from heads import build

NATIVE = {"_target_": "heads.mtp_native.NativeMTP"}
build_mimo = partial(build_tiny, mimo=True)


def begun(target_dir: Path):
    """The head as a new run begins it (train/setup.py)."""
    head, parts = build(NATIVE, spec(target_dir)), frozen(target_dir, torch.float32, "cpu")
    own = tensors(target_dir, head.begins_as.values())
    head.load_state_dict({ours: own[theirs] for ours, theirs in head.begins_as.items()})
    head.attach(parts)
    return head.eval(), parts


@pytest.fixture(scope="module")
def mimo(tmp_path_factory) -> Path:
    return build_mimo(tmp_path_factory.mktemp("mimo") / "target")


def test_an_untrained_export_is_the_targets_module_bit_for_bit(mimo, tmp_path):
    stored = load_file(mimo / "model.safetensors")
    for name in stored:
        stored[name] = stored[name].bfloat16()
    target_dir = tmp_path / "target"
    target_dir.mkdir()
    (target_dir / "config.json").write_text((mimo / "config.json").read_text())
    save_file(stored, target_dir / "model.safetensors")
    head, parts = begun(target_dir)
    out = export_head(
        head, parts, target_dir, tmp_path / "out", dtype=torch.bfloat16, head_cfg=NATIVE, k=3, provenance={"checkpoint": "step-000000"}
    )
    module = {name: tensor for name, tensor in stored.items() if ".mtp_layers." in name}
    written = load_file(out / "model.safetensors")
    assert written.keys() == module.keys() and all(torch.equal(written[name], module[name]) for name in module)
    assert read_export(out)["serving"]["method"] == "mtp"


def test_a_family_that_is_not_known_and_a_target_without_its_module_are_refused(mimo, tmp_path):
    with pytest.raises(ValueError, match=r"knows that of MiMoForCausalLM; this target is a DeepseekV3ForCausalLM.*head=mtp"):
        build(NATIVE, dataclasses.replace(SPEC, architecture="DeepseekV3ForCausalLM"))
    stored = load_file(mimo / "model.safetensors")
    save_file({name: tensor for name, tensor in stored.items() if ".mtp_layers." not in name}, tmp_path / "model.safetensors")
    names = build(NATIVE, spec(mimo)).begins_as.values()
    refused(lambda: tensors(tmp_path, names), "no tensor model.mtp_layers.0", "another head")


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    return probed(tmp_path_factory.mktemp("parity"), {"native": NATIVE}, build_target=build_mimo)


def test_logits_and_drafts_equal_vllms(probe):
    check(probe, "native")


def test_states_of_such_a_target_can_be_captured(mimo, tmp_path, monkeypatch):
    """vLLM's own class of it hands out no residual streams, and the state after the last layer is what the module reads."""
    monkeypatch.setenv("PYTHONPATH", str(plugin_installed(tmp_path)))
    responses, store = write_responses(tmp_path / "answers.jsonl", 1, 20, 12), tmp_path / "store"
    take(mimo, responses, store, taps=(2,))
    item = sequences(store, (2,))["r0#0"]
    assert config(mimo, "float32").model and json.loads((store / "manifest.json").read_text())["taps"] == [2]
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(mimo, dtype=torch.float32).eval()
        seen: list[torch.Tensor] = []
        model.model.norm.register_forward_hook(lambda _module, inputs, output: seen.extend([inputs[0][0], output[0]]))
        model(item["token_ids"].long()[None])
    torch.testing.assert_close(item["taps"][:, 0], seen[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(item["last"], seen[1], rtol=1e-4, atol=1e-4)
