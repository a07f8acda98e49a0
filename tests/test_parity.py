"""Our modules against vLLM's model classes, fed the same tokens and states, in float32: drafts equal, logits within 2e-3, every switch.

The heads are random, the target tiny and random; the export is the real one and vLLM is the real one. Starting vLLM takes most of the
time, so the first cases turn several switches on at once; the slow ones take each alone.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import yaml
from conftest import ROOT, plugin_installed
from transformers import AutoModelForCausalLM

from data.builtin import build_tiny
from data.target import frozen, spec
from eval.export import export_head
from heads import build
from heads.attention import Documents
from heads.base import Batch
from heads.block import BlockHead
from heads.dflash import DFlash
from heads.draft_lm import DraftLM
from heads.dspark import DSpark
from heads.eagle3 import Eagle3
from heads.lm import LanguageModel
from heads.mtp import MTP as MultiTokenPrediction
from heads.pard import Pard
from heads.peagle import PEagle

EAGLE3 = {"_target_": "heads.eagle3.Eagle3", "taps": [0, 1, 2]}
MTP = {"_target_": "heads.mtp.MTP"}
PEAGLE = {"_target_": "heads.peagle.PEagle", "taps": [0, 1, 2], "mask_token_id": 5}
SMALL = {"num_layers": 2, "hidden_size": 96, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 80}
WIDE = SMALL | {"num_layers": 1, "num_kv_heads": 3, "tie_embeddings": False}  # three times the target's keys and values
ODD = SMALL | {"hidden_size": 160, "num_heads": 2}  # two and a half times: pages of the cache that no block size makes equal
DRAFT_LM = {"_target_": "heads.draft_lm.DraftLM"}
PARD = {"_target_": "heads.pard.Pard", "mask_token_id": 5}
DFLASH = {"_target_": "heads.dflash.DFlash", "taps": [0, 1, 2], "mask_token_id": 5}
DSPARK = {"_target_": "heads.dspark.DSpark", "taps": [1, 2], "mask_token_id": 5, "markov_rank": 8, "plugin": True}
TOGETHER = {
    "eagle3": EAGLE3,
    "eagle3.1_reduced_two_taps": EAGLE3 | {"taps": [1, 2], "fc_norm": True, "norm_output": True, "draft_vocab_size": 200},
    "eagle3_one_tap_layers_own_rows": EAGLE3
    | {"taps": [2], "num_layers": 2, "norm_before_fc": True, "train_lm_head": True, "draft_vocab_size": 200},
    "eagle3_own_lm_head": EAGLE3 | {"train_lm_head": True, "norm_before_residual": True},
    "eagle3_no_taps": EAGLE3 | {"taps": []},
    "mtp": MTP,
    "mtp_without_norms": MTP | {"norms": False},
    "eagle": {"_target_": "heads.eagle.Eagle"},
    "peagle": PEAGLE,
    "peagle_reduced_two_taps": PEAGLE | {"taps": [1, 2], "num_layers": 2, "fc_norm": True, "draft_vocab_size": 200},
    "peagle_one_tap_one_layer": PEAGLE
    | {"taps": [2], "num_layers": 1, "norm_before_fc": True, "norm_before_residual": True, "train_lm_head": True},
    "draft_lm": DRAFT_LM | SMALL,
    "draft_lm_odd": DRAFT_LM | ODD,
    "draft_lm_untied": DRAFT_LM | WIDE,
    "pard": PARD | SMALL,
    "pard_untied": PARD | WIDE,
    "dflash_one_layer": DFLASH | {"num_layers": 1},  # vLLM's own class: with more layers it is wrong on a CPU
    "dflash_three_layers_causal": DFLASH | {"num_layers": 3, "causal": True, "taps": [1, 2], "plugin": True},
    "dspark": DSPARK,
    "dspark_causal_without_confidence": DSPARK | {"causal": True, "num_layers": 1, "confidence_weight": 0.0},
}
ALONE = {
    "eagle3_reduced": EAGLE3 | {"draft_vocab_size": 200},
    "eagle3_trained_lm_head": EAGLE3 | {"draft_vocab_size": 200, "train_lm_head": True},
    "eagle3_full_trained_lm_head": EAGLE3 | {"train_lm_head": True},
    "eagle3_fc_norm": EAGLE3 | {"fc_norm": True},
    "eagle3_norm_output": EAGLE3 | {"norm_output": True},
    "eagle3_norm_before_fc": EAGLE3 | {"norm_before_fc": True},
    "eagle3_norm_before_residual": EAGLE3 | {"norm_before_residual": True},
    "eagle3_two_layers": EAGLE3 | {"num_layers": 2},
    "eagle3_two_taps": EAGLE3 | {"taps": [1, 2]},
    "eagle3_one_tap": EAGLE3 | {"taps": [2]},
    "dflash_five_layers": DFLASH | {"num_layers": 5, "plugin": True},
    "dflash_causal": DFLASH | {"num_layers": 1, "causal": True},
}
GPU_ONLY = {DSpark: ("plugin", "sample_from_anchor")}  # one side of these is served by vLLM's V2 runner alone, which needs a GPU
PROMPT = [(7 * i * i + 3 * i) % 509 for i in range(11)]
LENGTH = 40


@torch.no_grad()
def greedy_states(target_dir: Path) -> tuple[list[int], list[torch.Tensor], torch.Tensor]:
    """The target's greedy continuation, its residual streams after 0..L layers, and its last state, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    tokens = list(PROMPT)
    for _ in range(LENGTH):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda _module, inputs, _output: before_norm.append(inputs[0][0]))
    states = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return tokens, [*(s[0] for s in states[:-1]), before_norm[0]], states[-1][0]


def random_head(conf: dict, target_dir: Path):
    torch.manual_seed(0)
    head = build(conf, spec(target_dir))
    parts = frozen(target_dir, torch.float32, "cpu")
    if head.draft_vocab_size is not None:
        head.set_draft_vocab(torch.randperm(spec(target_dir).vocab_size)[: len(head.draft_ids_U)].sort().values)
    for p in head.parameters():
        torch.nn.init.normal_(p, mean=0.0 if p.dim() > 1 else 1.0, std=0.15)
    for constant in head.buffers():
        if constant.is_floating_point():
            torch.nn.init.uniform_(constant, 0.5, 1.5)
    head.attach(parts)
    return head.eval(), parts


@torch.no_grad()
def our_logits(head, batch: Batch, row: int, drafts: list[int]) -> torch.Tensor:
    """Logits [K, V] of anchor `row`, feeding the engine's own drafts; -inf outside the draft vocabulary."""
    docs = Documents(batch.offsets_S1, torch.device("cpu"))
    if isinstance(head, LanguageModel):
        return lm_logits(head, batch, docs, row, drafts)
    if isinstance(head, BlockHead):
        anchor, place = batch.token_ids_T[row + 1 : row + 2], torch.tensor([row + 1])
        outputs = head.run(head.context(batch, docs), anchor, place, torch.zeros_like(place), len(drafts))
        return torch.cat([head.logits(x, torch.tensor([token])) for x, token in zip(outputs, [int(anchor), *drafts], strict=False)])
    index, _ = docs.shifted(1)
    tokens, state, caches, out = batch.token_ids_T[index], head.first_state(batch), head.caches(batch), []
    for token in drafts:
        x, state = head.step(state, head.embedded(head.frozen.embed_VD[tokens]), docs, caches)
        logits = x[row] @ head.head_rows(0).T
        if head.draft_ids_U is not None:
            logits = torch.full((head.target.vocab_size,), float("-inf")).index_copy(0, head.draft_ids_U, logits)
        out.append(logits)
        tokens = torch.full_like(tokens, token)
    return torch.stack(out)


def lm_logits(head: LanguageModel, batch: Batch, docs: Documents, row: int, drafts: list[int]) -> torch.Tensor:
    """The row of a language model that reads x_{row + 1}."""
    tokens, caches, out = batch.token_ids_T, head.caches(), []
    for token in drafts:
        out.append(head.run(tokens, docs, caches)[row + 1] @ head.head_rows(0).T)
        tokens = head.fed(torch.full_like(tokens, token))
    return torch.stack(out)


def probed(
    folder: Path,
    cases: dict,
    prepare: Callable[[str, Path], object] = lambda name, export: None,
    build_target: Callable[[Path], Path] = build_tiny,
    schemes: Mapping[str, str] = MappingProxyType({}),
):
    """(tokens, residual streams, last state, heads, what vLLM recorded). prepare: what is done to an export before; schemes: in which its
    weights are rounded. `eagle-` in a path would make EAGLE-1 of any head whose method is not passed."""
    target_dir = build_target(folder / "target")
    tokens, residuals, last = greedy_states(target_dir)
    heads, jobs = {}, []
    for name, conf in cases.items():
        head, parts = random_head(conf, target_dir)
        serving = head.serving(3)
        place = folder / (f"eagle-{name}" if serving["method"].startswith("eagle") else name)
        about = {"head_cfg": conf, "k": 3, "provenance": {"checkpoint": "step-000001"}, "quantization": schemes.get(name)}
        out = export_head(head, parts, target_dir, place, dtype=torch.float32, **about)
        prepare(name, out)
        overrides = serving.pop("target_hf_overrides", None)
        jobs.append(
            {"name": name, "target": str(target_dir), "folder": str(out), "serving": serving, "overrides": overrides}
            | {"prompt": PROMPT, "truth": tokens[len(PROMPT) :]}
        )
        heads[name] = head
    job = folder / "job.json"
    job.write_text(json.dumps(jobs))
    path = os.pathsep.join([str(ROOT), str(plugin_installed(folder))])
    environment = os.environ | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, ROOT / "tests/engine_probe.py", job], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return tokens, residuals, last, heads, torch.load(job.with_suffix(".pt"), weights_only=True)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return probed(tmp_path_factory.mktemp("parity"), TOGETHER)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return probed(tmp_path_factory.mktemp("parity"), ALONE)


@pytest.mark.parametrize("name", TOGETHER)
def test_logits_and_drafts_equal_vllms(together, name):
    check(together, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_each_switch_alone(alone, name):
    check(alone, name)


def check(probe, name, tolerance=2e-3, kv=()):
    tokens, residuals, last, heads, recorded = probe
    head, record = heads[name], recorded[name]
    assert record["output"] == tokens[len(PROMPT) :], "speculation changed the target's output"
    taps = torch.stack([residuals[t] for t in head.taps], 1) if head.taps else None
    ids = torch.tensor(tokens)
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([0, len(ids)]), taps, last, list(kv))
    drafts_Tk, _ = head.propose(batch, 3)
    judged, accepted = 0, set()
    for step in record["passes"]:
        row = step["committed"] - 2
        if step["committed"] >= len(tokens):
            continue
        ours = our_logits(head, batch, row, step["drafts"])
        finite = torch.isfinite(ours)
        assert torch.equal(finite, torch.isfinite(step["logits"]))
        error = (ours[finite] - step["logits"][finite]).norm() / ours[finite].norm()
        assert error < tolerance, f"logits of the pass at {step['committed']} differ by {error:.1e}"
        assert drafts_Tk[row].tolist() == step["drafts"]
        judged += 1
        accepted.add(step["committed"])
    assert judged >= 12 and len(accepted) == judged


def test_every_head_conf_has_a_case():
    """A head that is not held against the engine is not done."""
    classes = {yaml.safe_load(path.read_text())["_target_"] for path in (ROOT / "conf/head").glob("*.yaml")}
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*parity.py"))
    assert [c for c in sorted(classes) if f'"{c}"' not in tests] == []


def test_every_switch_is_on_in_one_case_and_off_in_another():
    for cls in (Eagle3, MultiTokenPrediction, PEagle, DraftLM, Pard, DFlash, DSpark):
        cases = [c for c in TOGETHER.values() if c["_target_"].endswith(f".{cls.__name__}")]
        switches = {k: p.default for k, p in inspect.signature(cls.__init__).parameters.items() if isinstance(p.default, bool)}
        for key in GPU_ONLY.get(cls, ()):
            del switches[key]
        assert switches
        for key, default in switches.items():
            assert {c.get(key, default) for c in cases} == {True, False}, key
