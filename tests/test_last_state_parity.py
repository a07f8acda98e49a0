"""The feed-forward heads in real vLLM: logits and drafts of Medusa's stock class and of the plug-in's classes equal ours, in both modes
of the plug-in; what cannot be served is refused when the engine starts; and offline chain and counters agree."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import plugin_installed
from test_engine import config, prompts
from test_parity import PROMPT, probed
from test_serve import K, trained_run

from data.builtin import build_tiny
from data.engine import generate
from data.errors import UserError
from data.target import frozen, spec
from eval.chain import offline_report
from eval.export import export_head
from eval.serve import evaluate
from heads import build
from heads.attention import Documents

MEDUSA = {"_target_": "heads.medusa.Medusa"}
HYDRA = {"_target_": "heads.hydra_heads.HydraHeads"}
MLP = {"_target_": "heads.mlp_speculator.MLPSpeculator"}
FAST = {
    "medusa_two_layers": MEDUSA | {"num_layers": 2},
    "hydra_own_lm_heads": HYDRA | {"train_lm_head": True, "num_layers": 2, "depths": 3},
    "hydra_tensor": HYDRA,
    "hydra_plus": HYDRA | {"prefix_layer": True},
    "mlp_tied_tensor": MLP | {"inner_dim": 96},
}
SLOW = {
    "medusa_own_lm_heads": MEDUSA | {"train_lm_head": True, "depths": 3},
    "hydra": HYDRA,
    "hydra_own_lm_heads_tensor": HYDRA | {"train_lm_head": True, "num_layers": 2},
    "hydra_plus_tensor": HYDRA | {"prefix_layer": True, "num_layers": 2},
    "mlp_tied": MLP | {"inner_dim": 48, "scale_input": False},
    "mlp_untied": MLP | {"tie_weights": False},
    "mlp_untied_tensor": MLP | {"tie_weights": False, "depths": 3, "inner_dim": 80},
}


def prepare(name, export):
    if name.endswith("_tensor"):
        path = export / "config.json"
        path.write_text(path.read_text().replace('"step_mode": "host"', '"step_mode": "tensor"'))
        assert json.loads(path.read_text())["draft_config"]["step_mode"] == "tensor"


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    return probed(tmp_path_factory.mktemp("parity"), FAST, prepare)


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return probed(tmp_path_factory.mktemp("parity"), SLOW, prepare)


@torch.no_grad()
def check(probe, name):
    tokens, _, last, heads, recorded = probe
    head, record, worst = heads[name], recorded[name], 0.0
    assert record["output"] == tokens[len(PROMPT) :], "speculation changed the target's output"
    passes = [step for step in record["passes"] if step["committed"] < len(tokens)]
    assert len(passes) >= 12 and len({step["committed"] for step in passes}) == len(passes)
    for step in passes:
        row = step["committed"] - 2
        docs = Documents(torch.tensor([0, len(last)]), torch.device("cpu"))
        docs.repeat(row, 1)
        state, token = head.first_state(last, docs), tokens[row + 1]
        for k, draft in enumerate(step["drafts"]):
            x, state = head.step(k, state, torch.tensor([token]))
            ours, theirs = (x @ head.head_rows(k).T)[0], step["logits"][k]
            worst = max(worst, float((ours - theirs).norm() / ours.norm()))
            assert int(ours.argmax()) == draft
            token = draft
    print(f"{name}: {len(passes)} passes, relative error of the logits up to {worst:.1e}")
    assert worst < 2e-3


@pytest.mark.parametrize("name", FAST)
def test_logits_and_drafts_equal_vllms(fast, name):
    check(fast, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_each_switch(slow, name):
    check(slow, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "eagle"}, 'served with "method": "eagle3", not \'eagle\''),
        ({"num_speculative_tokens": 5}, "num_speculative_tokens=5: this draft has 4 depths"),
    ],
)
def test_a_wrong_method_or_too_many_drafts_are_refused_at_the_start(change, words, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(plugin_installed(tmp_path)))
    target_dir = build_tiny(tmp_path / "target")
    head, parts = build(HYDRA, spec(target_dir)), frozen(target_dir, torch.float32, "cpu")
    out = export_head(
        head, parts, target_dir, tmp_path / "out", dtype=torch.float32, head_cfg=HYDRA, k=3, provenance={"checkpoint": "step-000001"}
    )
    asked = [{**r, "max_tokens": 4} for r in prompts(1)]
    with pytest.raises(UserError, match=words):
        generate(
            target_dir=target_dir, target_cfg=config(target_dir), prompts=asked, speculative=head.serving(3) | {"model": str(out)} | change,
            hf_overrides=None, dtype="float32", concurrency=1, max_model_len=64,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("head_cfg", [HYDRA | {"depths": K}], ids=["hydra"])
def test_offline_counts_are_the_engines_and_nothing_is_lost(head_cfg, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(plugin_installed(tmp_path)))
    cfg, target_dir, head, records, out = trained_run(head_cfg, tmp_path)
    cfg.eval.cut_loops, cfg.data.loop_ngram, cfg.eval.max_tokens, cfg.eval.methods = True, 1, 60, ["none", "head"]
    answers = tmp_path / "eval" / "plain.jsonl"
    report = evaluate(cfg, target_dir, out, records, answers)
    offline, engine = offline_report(cfg, head, target_dir, answers), report["methods"][1]
    assert engine["lossless"] == 1.0 and offline["unjudged_drafts"] == 0
    assert 0 < engine["accepted_tokens"] < engine["draft_tokens"], "the head must be right in part for this test to tell anything"
    assert (offline["drafts"], offline["accepted_per_position"]) == (engine["drafts"], engine["accepted_per_position"])
