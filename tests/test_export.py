"""An export holds every tensor under the engine's name, replaces the old one whole, and each silent fault of the engine is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.builtin import build_tiny
from data.errors import UserError
from data.target import fingerprint, frozen, spec
from eval.export import check_fingerprint, export_head, read_export, trained_head, validate_export
from heads import build

EAGLE3 = {"_target_": "heads.eagle3.Eagle3", "taps": [0, 1, 2]}
REDUCED = EAGLE3 | {"draft_vocab_size": 200}
MTP = {"_target_": "heads.mtp.MTP"}
NO_NORMS = MTP | {"norms": False}
PARALLEL = {"_target_": "heads.peagle.PEagle", "taps": [0, 1, 2], "mask_token_id": 5}
DFLASH = {"_target_": "heads.dflash.DFlash", "taps": [0, 2], "mask_token_id": 5}
DSPARK = {"_target_": "heads.dspark.DSpark", "taps": [1, 2], "mask_token_id": 5, "markov_rank": 8}
HEADS = {
    "eagle3": EAGLE3,
    "reduced": REDUCED,
    "two_taps": EAGLE3 | {"taps": [1, 2], "fc_norm": True, "num_layers": 2},
    "mtp": MTP,
    "eagle": NO_NORMS,
    "features": {"_target_": "heads.eagle.Eagle"},
    "parallel": PARALLEL,
    "parallel_reduced": PARALLEL | {"taps": [2], "num_layers": 2, "draft_vocab_size": 200},
    "dflash": DFLASH,
    "dflash_plugin": DFLASH | {"plugin": True, "num_layers": 1},
    "dspark": DSPARK | {"sample_from_anchor": True},
    "dspark_plugin": DSPARK | {"plugin": True, "confidence_weight": 0.0},
}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("target") / "tiny")


def made(conf: dict[str, Any], target_dir: Path):
    torch.manual_seed(0)
    head = build(conf, spec(target_dir))
    if head.draft_vocab_size is not None:
        head.set_draft_vocab(torch.arange(10, 410, 2))
    return head


def export(conf: dict[str, Any], target_dir: Path, out: Path, dtype: torch.dtype = torch.float32) -> Path:
    parts = frozen(target_dir, torch.float32, "cpu")
    return export_head(
        made(conf, target_dir), parts, target_dir, out, dtype=dtype, head_cfg=conf, k=3, provenance={"checkpoint": "step-000001"}
    )


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_arrives_under_its_engine_name(name, dtype, target_dir, tmp_path):
    head = made(HEADS[name], target_dir)
    out = export(HEADS[name], target_dir, tmp_path / "out", dtype)
    head.attach(frozen(target_dir, torch.float32, "cpu"))
    described = head.export()
    stored = load_file(out / "model.safetensors")
    assert set(stored) == set(described.names.values()) | set(described.extra)
    assert {ours for ours, _ in head.named_parameters()} == set(described.names)
    for ours, theirs in described.names.items():
        assert torch.equal(stored[theirs], head.state_dict()[ours].to(dtype)), theirs
    assert not any("embed_tokens" in theirs for theirs in stored), "the embedding is the target's"
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.") and None not in config.values()
    validate_export(out, spec(target_dir))


def test_what_it_is_and_how_to_serve_it_stand_beside_the_weights(target_dir, tmp_path):
    about = read_export(export(MTP, target_dir, tmp_path / "out"))
    assert (
        about["head"] == MTP
        and about["provenance"] == {"checkpoint": "step-000001"}
        and about["target_fingerprint"] == fingerprint(target_dir)
    )
    assert about["serving"] == {"method": "mtp", "num_speculative_tokens": 3, "target_hf_overrides": {"num_nextn_predict_layers": 1}}


def test_the_map_of_a_reduced_vocabulary_holds_offsets(target_dir, tmp_path):
    offsets = load_file(export(REDUCED, target_dir, tmp_path / "out") / "model.safetensors")["d2t"]
    assert torch.equal(offsets + torch.arange(200), torch.arange(10, 410, 2))


def test_a_new_export_replaces_the_old_one_and_leaves_nothing_else(target_dir, tmp_path):
    out = export(EAGLE3, target_dir, tmp_path / "out")
    (out / "stray.safetensors").write_bytes(b"")
    export(MTP, target_dir, out)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "draftsmith.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failed_export_keeps_the_old_one(target_dir, tmp_path):
    out = export(MTP, target_dir, tmp_path / "out")
    head = made(MTP, target_dir)
    torch.nn.init.constant_(head.input_proj.weight, float("nan"))
    with pytest.raises(UserError, match="input_proj.*NaN"):
        export_head(
            head,
            frozen(target_dir, torch.float32, "cpu"),
            target_dir,
            out,
            dtype=torch.float32,
            head_cfg=MTP,
            k=3,
            provenance={"checkpoint": "step-000001"},
        )
    validate_export(out, spec(target_dir))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_another_target_is_refused(target_dir, tmp_path):
    check_fingerprint(fingerprint(target_dir), target_dir)
    with pytest.raises(UserError, match="trained on a target with fingerprint 0123.*target.model"):
        check_fingerprint("0123", target_dir)


def test_a_checkpoint_of_another_head_section_is_refused(target_dir):
    state = made(MTP, target_dir).state_dict()
    assert trained_head(MTP, target_dir, state, torch.float32, "cpu").frozen.embed_VD.shape == (512, 64)
    with pytest.raises(UserError, match="does not fit the conf's head section"):
        trained_head(NO_NORMS, target_dir, state, torch.float32, "cpu")


Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def drop(name: str) -> Edit:
    return lambda config, tensors: tensors.pop(name)


def put(name: str, make: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> Edit:
    return lambda config, tensors: tensors.update({name: make(tensors)})


def unset(key: str) -> Edit:
    return lambda config, tensors: config.pop(key)


def setting(**values: Any) -> Edit:
    return lambda config, tensors: config.update(values)


def inner(**values: Any) -> Edit:
    return lambda config, tensors: config["dflash_config"].update(values)


def no_taps(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]


FAULTS: dict[str, tuple[dict[str, Any], Edit, str]] = {
    "missing norm becomes ones": (EAGLE3, drop("norm.weight"), "missing tensor norm.weight"),
    "reduced vocabulary without map": (REDUCED, drop("d2t"), "missing tensor d2t"),
    "reduced vocabulary without lm_head": (REDUCED, drop("lm_head.weight"), "missing tensor lm_head.weight"),
    "absolute ids in the map": (REDUCED, put("d2t", lambda t: t["d2t"] + torch.arange(200)), "must hold offsets"),
    "map of another type": (REDUCED, put("d2t", lambda t: t["d2t"].int()), "not torch.int64"),
    "map that repeats an id": (REDUCED, put("d2t", lambda t: t["d2t"] - (torch.arange(200) == 7) * 2), "does not ascend"),
    "lm_head of another size": (REDUCED, put("lm_head.weight", lambda t: t["lm_head.weight"][:100].clone()), "lm_head.weight has shape"),
    "bias that is dropped": (EAGLE3, put("fc.bias", lambda t: torch.zeros(64)), "fc.bias has no place"),
    "ignored reverse map": (REDUCED, put("t2d", lambda t: torch.ones(512)), "t2d has no place"),
    "other dtype": (EAGLE3, put("norm.weight", lambda t: t["norm.weight"].half()), "norm.weight is torch.float16"),
    "infinite weight": (EAGLE3, put("norm.weight", lambda t: t["norm.weight"] / 0), "norm.weight holds NaN or Inf"),
    "no layer ids": (EAGLE3, no_taps, "default layers"),
    "layer ids out of order": (EAGLE3, setting(eagle_aux_hidden_state_layer_ids=[2, 1, 0]), "must ascend"),
    "two taps, not announced": (HEADS["two_taps"], unset("num_aux_hidden_states"), "num_aux_hidden_states is not set"),
    "switch lost": (EAGLE3, unset("norm_before_residual"), "norm_before_residual is not set"),
    "switch turned on": (EAGLE3, setting(norm_before_fc=True), "missing tensor input_norm.weight|norm_before_fc"),
    "rope lost": (EAGLE3, unset("rope_theta"), "no rope_theta"),
    "epsilon lost": (MTP, unset("rms_norm_eps"), "rms_norm_eps is not set"),
    "null": (MTP, setting(use_cache=None), "use_cache is null"),
    "another vocabulary": (EAGLE3, setting(vocab_size=1000), "vocab_size is 1000"),
    "module sized unlike the target": (MTP, setting(intermediate_size=96), "intermediate_size is 96"),
    "missing bias": (MTP, drop("model.mtp_layers.0.self_attn.k_proj.bias"), "missing tensor .*k_proj.bias"),
    "missing output norm": (MTP, drop("model.mtp_layers.0.final_layernorm.weight"), "missing tensor .*final_layernorm"),
    "lm_head where none belongs": (NO_NORMS, put("lm_head.weight", lambda t: torch.ones(512, 64)), "lm_head.weight has no place"),
    "first norm of EAGLE": (
        NO_NORMS,
        put("layers.0.input_layernorm.weight", lambda t: torch.ones(64)),
        "layers.0.input_layernorm.weight has no place",
    ),
    "mask state lost": (PARALLEL, drop("mask_hidden"), "missing tensor mask_hidden"),
    "mask state of fewer taps": (PARALLEL, put("mask_hidden", lambda t: torch.zeros(128)), r"mask_hidden has shape \[128\]"),
    "mask token lost": (PARALLEL, unset("ptd_token_id"), "parallel_drafting True and the config no mask token"),
    "mask token that has no row": (PARALLEL, setting(ptd_token_id=512), "ptd_token_id is 512, no row of the embedding"),
    "mask token where none belongs": (EAGLE3, setting(ptd_token_id=5), "parallel_drafting False and the config ptd_token_id"),
    "mask token of a block lost": (DFLASH, inner(mask_token_id=None), "dflash_config.mask_token_id is not set"),
    "mask token of a block without a row": (DFLASH, inner(mask_token_id=512), "mask_token_id 512 has no row"),
    "direction of attention lost": (DFLASH, inner(causal=None), "dflash_config.causal is not set"),
    "another key that says causal": (DFLASH, setting(is_causal=True), "is_causal is set and overrules"),
    "layer ids off by one": (DFLASH, inner(target_layer_ids=[0, 2]), "disagree"),
    "slot convention lost": (DSPARK, unset("sample_from_anchor"), "sample_from_anchor is not set"),
    "slot convention of another method": (DFLASH, setting(sample_from_anchor=True), "sample_from_anchor is true"),
    "slot convention where dspark refuses it": (HEADS["dspark"], inner(sample_from_anchor=True), "sample_from_anchor is true"),
    "norm of a head's keys lost": (DFLASH, drop("layers.1.self_attn.k_norm.weight"), "missing tensor layers.1.self_attn.k_norm"),
    "Markov term of another rank": (DSPARK, setting(markov_rank=9), "markov_w1.weight has shape"),
    "half a confidence": (DSPARK, drop("confidence_head.proj.bias"), "missing tensor confidence_head.proj.bias"),
    "narrower block than is drafted": (DFLASH, setting(block_size=3), "num_speculative_tokens is 3, the head has 2 depths"),
    "unknown architecture": (MTP, setting(architectures=["FooForCausalLM"]), "FooForCausalLM .* knows LlamaForCausalLMEagle3"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_engine_would_swallow_is_refused(fault, target_dir, tmp_path):
    conf, edit, message = FAULTS[fault]
    out = export(conf, target_dir, tmp_path / "out")
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    edit(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(UserError, match=message):
        validate_export(out, spec(target_dir))


def test_stray_weights_beside_the_export_are_refused(target_dir, tmp_path):
    out = export(MTP, target_dir, tmp_path / "out")
    save_file({"x": torch.ones(1)}, out / "more.safetensors")
    with pytest.raises(UserError, match="unknown file more.safetensors"):
        validate_export(out, spec(target_dir))


@pytest.mark.parametrize("word", ["eagle3", "Eagle-", "dflash", "dspark"])
def test_a_path_that_makes_the_engine_take_another_method_is_refused(word, target_dir, tmp_path):
    run_dir = tmp_path / f"my_{word}x"
    with pytest.raises(UserError, match=f"'{word.lower()}' in it.*run_dir"):
        export(MTP, target_dir, run_dir / "vllm")
    assert not list(run_dir.iterdir())
    export(EAGLE3, target_dir, run_dir / "vllm")


def test_a_folder_that_is_no_export_names_the_command(target_dir, tmp_path):
    with pytest.raises(UserError, match=r"launch/export.py"):
        validate_export(tmp_path, spec(target_dir))
