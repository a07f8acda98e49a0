"""Gemma 4's drafter against vLLM's proposer and transformers' class, both loaded from the export, in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import refused
from safetensors.torch import load_file
from test_parity import check, probed, random_head
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from data.builtin import build_tiny_gemma4
from data.forward import Forward
from data.sequences import Sequences
from data.target import spec
from eval.export import export_head
from heads import build
from heads.base import Batch
from train import dist, setup
from train.config import load

HEAD = {"_target_": "heads.gemma4_mtp.Gemma4MTP", "hidden_size": 64, "num_heads": 2, "intermediate_size": 96}
BOTH = HEAD | {"layers": ["sliding_attention", "sliding_attention", "full_attention"]}
FULL = HEAD | {"layers": ["full_attention"], "num_heads": 1}


def keys_values(target: Path, head, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    _, last, kv = Forward(target, (), torch.float32, "cpu").states_and_kv(ids, head.kv_layers)
    return last, kv


@pytest.mark.parametrize("conf", [BOTH, pytest.param(FULL, marks=pytest.mark.slow)], ids=["both", "full"])
def test_logits_and_drafts_equal_vllms(tmp_path, conf):
    found = probed(tmp_path, {"head": conf}, build_target=build_tiny_gemma4)
    tokens, head = found[0], found[3]["head"]
    check(found, "head", kv=keys_values(tmp_path / "target", head, torch.tensor(tokens))[1])


def test_logits_equal_those_of_transformers_class(tmp_path):
    """Position and window are the engine's: transformers' generator asks from one position later, and its sliding layers would see one
    position more than the window."""
    target, t = build_tiny_gemma4(tmp_path / "target"), 25
    window = spec(target).kinds["sliding_attention"]["window"]
    head, parts = random_head(BOTH, target)
    about = {"head_cfg": BOTH, "k": 3, "provenance": {"checkpoint": "step-000001"}}
    out = export_head(head, parts, target, tmp_path / "out", dtype=torch.float32, **about)
    assistant, loading = Gemma4AssistantForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    text = assistant.config.get_text_config()
    for i, name in enumerate(text.layer_types):
        kind = spec(target).kinds[name]
        layer = text.per_layer_config[i]
        assert (layer.head_dim, layer.num_key_value_heads) == (kind["head_dim"], kind["num_kv_heads"])
    ids = torch.randint(3, 500, (30,), generator=torch.Generator().manual_seed(0))
    last, kv = keys_values(target, head, ids)
    drafts, log_q = head.propose(Batch(ids, torch.ones(30, dtype=torch.bool), torch.tensor([0, 30]), None, last, kv), 3)
    first = {"full_attention": 0, "sliding_attention": t + 1 - window}
    assert first["sliding_attention"] > 0
    shared = {name: tuple(x[first[name] : t + 1, i].transpose(0, 1)[None] for i in (0, 1)) for name, x in zip(head.kinds, kv, strict=True)}
    token, state = int(ids[t + 1]), last[t]
    for k in range(3):
        inputs = torch.cat([parts.embed_VD[token] * head.target.embed_scale, state])[None, None]
        with torch.no_grad():
            found = assistant.eval()(inputs_embeds=inputs, position_ids=torch.tensor([[t]]), shared_kv_states=shared)
        best, token = found.logits[0, 0].log_softmax(-1).max(-1)
        state, token = found.last_hidden_state[0, 0], int(token)
        assert token == drafts[t, k]
        torch.testing.assert_close(best, log_q[t, k], rtol=1e-4, atol=1e-5)


def test_a_run_begins_with_a_drafter_that_transformers_saved(tmp_path):
    """Its norms' constants too; one whose lm_head is split into clusters is refused."""
    target = build_tiny_gemma4(tmp_path / "target")
    words = ["conf=tiny_gemma4_mtp", f"target.model={target}", f"run_dir={tmp_path}/run", f"train.init={tmp_path}/published"]
    cfg = load(words)
    head, published = build(cfg.head, spec(target)), tmp_path / "published"
    assistant = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(**head.export().config)).float()
    for i, layer in enumerate(assistant.model.layers):
        layer.layer_scalar.fill_(0.5 + i)
    assistant.save_pretrained(published)
    dist.start(1)
    answers = Sequences()  # what it would count a draft vocabulary in
    setup.equip(cfg, head, target, answers)
    stored = load_file(published / "model.safetensors")
    assert len(stored) == len(head.state_dict())
    assert all(torch.equal(head.state_dict()[ours], stored[theirs]) for ours, theirs in head.export().names.items())
    assert float(head.layers[1].layer_scalar) == 1.5
    text = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(text | {"use_ordered_embeddings": True}))
    refused(lambda: setup.equip(cfg, head, target, answers), "use_ordered_embeddings is True there and False in this head section")
