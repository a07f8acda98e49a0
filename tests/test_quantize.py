"""Exports with rounded weights: they hold what the scheme says, vLLM computes with them what our module computes with the same rounded
weights, and a head, a machine or a size for which there is no such thing is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import refused
from safetensors.torch import load_file, save_file
from test_export import HEADS
from test_parity import DFLASH, DRAFT_LM, EAGLE3, PEAGLE, SMALL, check, probed

from data.builtin import build_tiny
from data.errors import UserError
from data.target import frozen, spec
from eval.export import export_head, read_export, validate_export
from eval.quantize import SCHEMES, check_device
from eval.report import comparison
from heads import build
from heads.base import DraftHead
from heads.eagle import Eagle
from heads.eagle3 import Eagle3
from heads.layers import rows_at
from train.checks import QUANTIZATION
from train.config import load

EAGLE = {"_target_": "heads.eagle.Eagle"}
CASES = {
    "eagle3": (EAGLE3, "int8"),
    "eagle3_reduced": (EAGLE3 | {"draft_vocab_size": 200, "fc_norm": True, "num_layers": 2}, "int8"),
    "eagle": (EAGLE, "int8"),
    "peagle": (PEAGLE, "int8"),
    "draft_lm": (DRAFT_LM | SMALL | {"intermediate_size": 96}, "int8"),
    "dflash": (DFLASH | {"num_layers": 1}, "int8"),
}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("target") / "tiny")


def rounded_export(conf: dict, target_dir: Path, out: Path, scheme: str | None, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(0)
    head, parts = build(conf, spec(target_dir)), frozen(target_dir, torch.float32, "cpu")
    if head.draft_vocab_size is not None:
        head.set_draft_vocab(torch.arange(10, 410, 2))
    about = {"head_cfg": conf, "k": 3, "provenance": {"checkpoint": "step-000001"}, "quantization": scheme}
    return head, export_head(head, parts, target_dir, out, dtype=dtype, **about)


def unpacked(packed_NP: torch.Tensor) -> torch.Tensor:
    """Eight numbers of four bits from each int32, the lowest bits first; 8 stands for zero."""
    return torch.stack([(packed_NP >> 4 * i) & 15 for i in range(8)], -1).flatten(1) - 8


def read_rounded(out: Path) -> dict[str, torch.Tensor]:
    """Tensor name -> what it stands for, of every tensor of an export that has a scale."""
    tensors = load_file(out / "model.safetensors")
    found = {}
    for name, scale in tensors.items():
        if name.endswith("weight_scale"):
            prefix = name.removesuffix("_scale")
            q = unpacked(tensors[f"{prefix}_packed"]) if f"{prefix}_packed" in tensors else tensors[prefix]
            found[prefix] = q.float() * scale.float().repeat_interleave(q.shape[1] // scale.shape[1], 1)
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("conf", [EAGLE3, EAGLE, PEAGLE, DFLASH], ids=lambda conf: conf["_target_"])
def test_every_projection_is_within_half_a_step_of_its_weight(conf, scheme, target_dir, tmp_path):
    head, out = rounded_export(conf, target_dir, tmp_path / "out", scheme)
    validate_export(out, spec(target_dir))
    names, found = {theirs: ours for ours, theirs in head.export().names.items()}, read_rounded(out)
    linear = [theirs for theirs, ours in names.items() if theirs.endswith("_proj.weight")]
    assert set(found) == {*linear, *(["fc.weight"] if "fc.weight" in names and "peagle" not in conf["_target_"] else [])}
    for name, value in found.items():
        weight = head.state_dict()[names[name]]
        groups = weight.unflatten(1, (-1, 64 if scheme == "int4" else weight.shape[1]))
        largest = groups.abs().amax(-1, keepdim=True).expand_as(groups).flatten(1)
        # Half a step; of e4m3, which has three bits behind the first, a sixteenth of the number, or less among the smallest.
        # The scales of int4 are bfloat16 here, which adds at most 0.4 % of eight steps.
        most = {"int8": largest / 255, "int4": largest / 14, "fp8": torch.maximum(weight.abs() / 16, largest / 448 / 512)}[scheme]
        assert ((value - weight).abs() <= most * 1.02).all(), name


def test_what_was_saved_stands_beside_the_weights(target_dir, tmp_path):
    sizes = {}
    for scheme in (None, "int8", "int4"):
        _, out = rounded_export(EAGLE3, target_dir, tmp_path / str(scheme), scheme)
        sizes[scheme] = (out / "model.safetensors").stat().st_size
        said = read_export(out).get("quantization")
        assert said is None if scheme is None else said["scheme"] == scheme and said["bytes"] < said["bytes_without"]
        if scheme:
            assert abs(sizes[None] - sizes[scheme] - (said["bytes_without"] - said["bytes"])) < 4000  # the header's own length
    assert sizes["int4"] < sizes["int8"] < 0.65 * sizes[None]


@pytest.mark.parametrize("name", ["mtp", "dspark", "dflash_plugin"])
def test_a_head_whose_class_reads_none_is_refused(name, target_dir, tmp_path):
    refused(lambda: rounded_export(HEADS[name], target_dir, tmp_path / "out", "int8"), "export.quantization=int8", "leave it null")
    assert not (tmp_path / "out").exists()


def test_sizes_that_make_no_groups_and_unknown_schemes_are_refused(target_dir, tmp_path):
    odd = DRAFT_LM | SMALL | {"intermediate_size": 80}
    refused(lambda: rounded_export(odd, target_dir, tmp_path / "out", "int4"), "no multiples of 32", "int8")
    refused(lambda: load(["conf=tiny_eagle3", "export.quantization=int2"]), "export.quantization=int2", *SCHEMES)
    assert tuple(SCHEMES) == QUANTIZATION, "what the config lets through is what an export knows"


X86 = {"architecture": "x86_64", "avx512_f": False, "avx512_vnni": False, "avx_vnni": False, "amx_tile": False}
OLD, NEW = X86, X86 | {"avx512_f": True, "avx512_vnni": True}
AMX = NEW | {"amx_tile": True}


@pytest.mark.parametrize(("scheme", "cpu"), [("fp8", OLD), ("fp8", NEW), ("int4", OLD), ("int8", OLD), ("int8", X86 | {"avx512_f": True})])
def test_what_the_engine_cannot_compute_here_is_refused_before_it_starts(scheme, cpu):
    refused(lambda: check_device(scheme, "bfloat16", False, cpu), scheme, "on this CPU", "export.quantization")
    check_device(scheme, "bfloat16", True, cpu)


def test_what_it_can_is_not():
    for scheme, cpu in (("int8", NEW), ("int8", X86 | {"avx_vnni": True}), ("int8", X86 | {"architecture": "aarch64"}), ("int4", NEW)):
        check_device(scheme, "bfloat16", False, cpu)
    check_device("int8", "float32", False, NEW)
    check_device("int8", "float32", False, {"architecture": "aarch64"})
    for scheme, cpu in (("int4", NEW), ("int4", AMX), ("int8", AMX)):
        refused(
            lambda scheme=scheme, cpu=cpu: check_device(scheme, "float32", False, cpu), "eval.dtype=bfloat16", "export.quantization=null"
        )
        check_device(scheme, "float32", True, cpu)
        check_device(scheme, "bfloat16", False, cpu)


FAULTS = {
    "a scale lost": (lambda tensors: tensors.pop("fc.weight_scale"), "missing tensor fc.weight_scale"),
    "a weight that is not rounded": (lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 192)}), "fc.weight is torch.float32"),
    "a scale of another type": (
        lambda tensors: tensors.update({"fc.weight_scale": tensors["fc.weight_scale"].half()}),
        "fc.weight_scale is torch.float16",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rounded_export_that_would_load_wrongly_is_refused(fault, target_dir, tmp_path):
    _, out = rounded_export(EAGLE3, target_dir, tmp_path / "out", "int8")
    tensors = load_file(out / "model.safetensors")
    edit, words = FAULTS[fault]
    edit(tensors)
    save_file(tensors, out / "model.safetensors")
    refused(lambda: validate_export(out, spec(target_dir)), words)


def test_the_report_says_what_rounding_costs():
    offline = {"acceptance_length": 1.7, "unjudged_drafts": 0, "drafts": 10}
    report = {
        "offline": offline,
        "methods": [{"method": "head", "k": 3, "concurrency": 1, "acceptance_length": 1.68, "draft_sample_method": "greedy"}],
    }
    said = {"scheme": "int4", "bytes": 3_000_000, "bytes_without": 9_000_000}
    text = comparison(report | {"quantization": said})
    assert "rounding costs 0.020" in text and "3.00 MB instead of 9.00 MB" in text and "int4" in text


def round_inputs(_module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """What a W8A8 kernel reads: int8 with a scale per token."""
    scale = inputs[0].abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
    return (inputs[0] / scale).round().clamp(-128, 127) * scale


def join_inputs(head: DraftHead) -> None:
    """Embedding and state as one input again, as a W8A8 kernel rounds them: training works out the embedding's part by itself."""
    if isinstance(head, Eagle3):
        block = head.first

        def forward(state, embed, docs, cache, last):
            rows, normed = rows_at(docs, cache, last), block.hidden_norm(state)
            residual = state if cache.keys else rows.of(state)
            h = residual + block.self_attn(torch.cat([block.input_layernorm(embed), normed], -1), docs, cache, rows)
            return h + block.mlp(block.post_attention_layernorm(h))

        block.forward, block.embedded = forward, lambda embed: embed
    elif isinstance(head, Eagle):
        assert not head.norms

        def step(state, embed, docs, caches):
            x = head.block(head.input_proj(torch.cat([embed, state], -1)), docs, caches[0], last=True)
            return x, x

        head.step, head.embedded = step, lambda embed: embed


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    folders: dict[str, Path] = {}
    confs, schemes = ({name: case[i] for name, case in CASES.items()} for i in (0, 1))
    tokens, residuals, last, heads, recorded = probed(
        tmp_path_factory.mktemp("parity"), confs, lambda name, out: folders.update({name: out}), schemes=schemes
    )
    for name, head in heads.items():
        ours = {theirs: ours for ours, theirs in head.export().names.items()}
        values = read_rounded(folders[name])
        head.load_state_dict({ours[theirs]: value for theirs, value in values.items()}, strict=False)
        for theirs in values:
            head.get_submodule(ours[theirs].removesuffix(".weight")).register_forward_pre_hook(round_inputs)
        join_inputs(head)
        assert json.loads((folders[name] / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    return tokens, residuals, last, heads, recorded


def able() -> bool:
    try:
        check_device("int8", "float32", False, torch.cpu.get_capabilities())
    except UserError:
        return False
    return True


@pytest.mark.skipif(not able(), reason="float32: without VNNI the engine's int8 products saturate, and AMX takes bfloat16 alone")
@pytest.mark.parametrize("name", CASES)
def test_vllm_computes_with_the_rounded_weights(probe, name):
    check(probe, name, tolerance=2e-2)  # where rounding of an input tips over, it is by a whole step
