"""The module of a GLM-4-MoE: the head contract once more, for a layer with experts, norms on q and k and heads that turn in part; its
mathematics against loops over tokens and experts in float64; the plan at the size of a published target."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import live
import pytest
import torch
from conftest import SPEC, batch_of, ready, refused
from safetensors.torch import load_file
from test_cli import folders, run
from test_heads import (  # noqa: F401 (collected here too, with the head of this file)
    test_a_depth_worked_out_again_has_the_same_gradient_and_keeps_less,
    test_causality,
    test_counts_follow_the_shifted_mask,
    test_documents_are_isolated_and_packing_changes_nothing,
    test_every_parameter_learns_and_frozen_parts_do_not,
    test_export_names_every_parameter_once,
    test_gradient_is_that_of_the_loss,
    test_gradients_of_packed_and_split_batches_agree,
    test_labels_can_be_shared_out_over_ranks,
    test_shapes_counts_and_metrics,
    test_training_and_drafting_agree,
    test_training_measures_what_evaluation_does,
    test_unsupervised_documents_change_neither_loss_nor_count,
)
from torch.utils.flop_counter import FlopCounterMode

from data.builtin import build_tiny_glm4_moe
from data.target import frozen, spec
from eval.layouts import check_config
from heads import build
from heads.base import TargetSpec
from heads.moe import MixtureOfExperts
from train import checkpoint, plan, sizes
from train.config import load

NATIVE = {"_target_": "heads.mtp_native.NativeMTP", "depths": 3, "depth_decay": 0.8, "loss": "kl", "loss_chunk": 1024}
MOE = {"experts": 6, "chosen": 2, "shared": 1, "expert_size": 24, "dense_layers": 1, "renormalize": True, "scale": 1.5}
MOE |= {"qkv_bias": True, "qk_norm": True}
CORRECTION = torch.linspace(0.4, -0.4, MOE["experts"])  # with which every expert of the head below has some row
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.5}
GLM = dataclasses.replace(SPEC, architecture="Glm4MoeForCausalLM", kinds=None, moe=MOE, rope_scaling=PARTIAL)
AIR = TargetSpec(  # config.json of GLM-4.5-Air
    hidden_size=4096,
    num_layers=46,
    vocab_size=151552,
    num_heads=96,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=10944,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    max_positions=131072,
    rope_scaling=PARTIAL,
    architecture="Glm4MoeForCausalLM",
    moe=MOE | {"experts": 128, "chosen": 8, "expert_size": 1408, "scale": 1.0, "qk_norm": False},
)


@pytest.fixture
def head():
    return random_head().eval()


def random_head(moe: dict | None = None, dtype: torch.dtype = torch.float64):
    head = ready(NATIVE, dtype, dataclasses.replace(GLM, moe=moe or MOE))
    for gate in (module.gate for module in head.modules() if isinstance(module, MixtureOfExperts)):
        torch.nn.init.normal_(gate.weight, std=0.3)
        gate.e_score_correction_bias.copy_(CORRECTION)
    return head


def norm(x, weight):
    return [v / math.sqrt(sum(u * u for u in x) / len(x) + SPEC.rms_norm_eps) * w for v, w in zip(x, weight.tolist(), strict=True)]


def product(weight, x):
    return [sum(a * b for a, b in zip(row, x, strict=True)) for row in weight.tolist()]


def mlp(part, x):
    gate, up = product(part.gate_proj.weight, x), product(part.up_proj.weight, x)
    return product(part.down_proj.weight, [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)])


def mixture(part, x, moe):
    score = [1 / (1 + math.exp(-z)) for z in product(part.gate.weight, x)]
    biased = [s + b for s, b in zip(score, part.gate.e_score_correction_bias.tolist(), strict=True)]
    chosen = sorted(range(len(score)), key=lambda e: -biased[e])[: moe["chosen"]]
    total = sum(score[e] for e in chosen) if moe["renormalize"] else 1.0
    out = mlp(part.shared_experts, x) if moe["shared"] else [0.0] * len(x)
    for e in chosen:
        out = [a + moe["scale"] * score[e] / total * b for a, b in zip(out, mlp(part.experts[e], x), strict=True)]
    return out


@pytest.mark.parametrize("change", [{}, {"renormalize": False, "chosen": 3}, {"shared": 0}, {"shared": 2, "chosen": 1}])
def test_experts_equal_loops_over_tokens_and_experts(change):
    moe = MOE | change
    part, x = random_head(moe).block.mlp, torch.randn(7, SPEC.hidden_size, dtype=torch.float64)
    expected = torch.tensor([mixture(part, row, moe) for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(part(x), expected, rtol=1e-9, atol=1e-9)


def test_the_correction_chooses_and_weighs_nothing():
    gate = random_head().block.mlp.gate
    x = torch.randn(50, SPEC.hidden_size, dtype=torch.float64)
    gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9, 0, 0, 0, 0]))
    chosen, weight = gate(x)
    assert chosen.sort().values.tolist() == [[0, 1]] * 50
    score = torch.sigmoid(x @ gate.weight.T).gather(1, chosen)
    torch.testing.assert_close(weight, 1.5 * score / score.sum(1, keepdim=True))


def test_the_correction_is_no_parameter_and_stays_float32():
    head = random_head().bfloat16()
    name, value = next((n, b) for n, b in head.named_buffers() if n.endswith("e_score_correction_bias"))
    assert torch.equal(value, CORRECTION) and name in head.begins_as
    assert name not in dict(head.named_parameters()) and head.block.mlp.gate.weight.dtype == torch.bfloat16


def test_an_expert_that_no_row_chose_has_a_gradient_of_zeros():
    part = random_head().block.mlp
    part.gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9, 0, 0, 0, 0]))
    part(torch.randn(5, SPEC.hidden_size, dtype=torch.float64)).sum().backward()
    assert part.experts[0].up_proj.weight.grad.abs().max() > 0
    assert all(not p.grad.any() for p in part.experts[4].parameters())


def naive_drafts(head, tokens, last, k):
    """What an engine does that knows x_0..x_n and the states of x_0..x_{n-1}: rows of (state, next token), all worked out anew for each
    draft. Returns (drafts, log q of each)."""
    N, M, H, turning = SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim, SPEC.head_dim // 2
    block, embed = head.block, head.frozen.embed_VD
    read, states, drafts, scores = list(tokens[1:]), [row.tolist() for row in last], [], []

    def turn(x, t):
        half, out = turning // 2, list(x)
        for i in range(half):
            angle = t * SPEC.rope_theta ** (-2 * i / turning)
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    def heads_of(proj, x, count, weight, t):
        flat = [v + b for v, b in zip(product(proj.weight, x), proj.bias.tolist(), strict=True)]
        split = [flat[i * H : (i + 1) * H] for i in range(count)]
        return split if weight is None else [turn(norm(part, weight), t) for part in split]

    for _ in range(k):
        keys, values, x = [], [], []
        for t, token in enumerate(read):
            e = norm([0.0] * SPEC.hidden_size if t == 0 else embed[token].tolist(), head.token_layernorm.weight)
            x = product(head.input_proj.weight, e + norm(states[t], head.hidden_layernorm.weight))
            z = norm(x, block.input_layernorm.weight)
            keys.append(heads_of(block.self_attn.k_proj, z, M, block.self_attn.k_norm.weight, t))
            values.append(heads_of(block.self_attn.v_proj, z, M, None, t))
        queries, mixed = heads_of(block.self_attn.q_proj, z, N, block.self_attn.q_norm.weight, t), []
        for n in range(N):
            seen = [math.exp(sum(a * b for a, b in zip(queries[n], key[n * M // N], strict=True)) / math.sqrt(H)) for key in keys]
            mixed += [sum(w * v[n * M // N][i] for w, v in zip(seen, values, strict=True)) / sum(seen) for i in range(H)]
        x = [a + b for a, b in zip(x, product(block.self_attn.o_proj.weight, mixed), strict=True)]
        x = [a + b for a, b in zip(x, mixture(block.mlp, norm(x, block.post_attention_layernorm.weight), MOE), strict=True)]
        logits = torch.tensor(product(head.frozen.lm_head_VD, norm(x, head.final_layernorm.weight)), dtype=torch.float64)
        drafts.append(int(logits.argmax()))
        scores.append(float(logits.log_softmax(0).max()))
        read.append(drafts[-1])
        states.append(x)  # before the norm: what vLLM's class returns
    return drafts, scores


def test_drafts_equal_the_computation_token_by_token(head):
    batch = batch_of(head, (7,))
    drafts, log_q = head.propose(batch, 3)
    for row in (0, 2, 5):
        expected, scores = naive_drafts(head, batch.token_ids_T.tolist()[: row + 2], batch.last_TD[: row + 1], 3)
        assert drafts[row].tolist() == expected
        torch.testing.assert_close(log_q[row], torch.tensor(scores, dtype=torch.float32), rtol=1e-5, atol=1e-5)


def test_a_published_size_is_planned_by_its_numbers():
    """GLM-4.5-Air: 106 billion parameters, 12 of them met by a token, as its makers say; its module by hand."""
    with torch.device("meta"):
        head = build(NATIVE, AIR)
    D, q, kv, expert = 4096, 96 * 128, 8 * 128, 3 * 4096 * 1408
    beside = 2 * D * D + 2 * D * q + q + 2 * (D + 1) * kv + 128 * D + 5 * D  # projection, attention with biases, router, five norms
    assert sum(p.numel() for p in head.parameters()) == beside + 129 * expert
    assert sizes.target_parameters(AIR) == pytest.approx(106e9, rel=0.02)
    assert sizes.target_flops(AIR, 0) / 2 == pytest.approx(12e9, rel=0.05)
    rows, outputs = plan.worked(head, 4096)
    met = 2 * D * D + 2 * D * (q + kv) + 128 * D + 9 * expert
    expected = 2 * D * 151552 + (rows * (6 * met + 12 * q * 1024) + outputs * 4 * D * 151552) / 4096
    assert plan.flops_per_token(head, AIR, 2048, 4096) == expected


def test_operations_are_about_those_that_torch_counts():
    head = random_head(dtype=torch.float32).train()
    batch = batch_of(head, (32,) * 8, torch.float32)
    batch.loss_mask_T[:] = True
    with FlopCounterMode(display=False) as counter:
        head.loss(batch).total.backward()
    assert 0.95 < 256 * plan.flops_per_token(head, GLM, 32, 256) / counter.get_total_flops() < 1.6


def test_what_a_layer_keeps_is_about_what_autograd_keeps():
    part, kept = random_head(dtype=torch.float32).block.mlp, {}
    x = torch.randn(256, SPEC.hidden_size, requires_grad=True)
    given = {p.untyped_storage().data_ptr() for p in part.parameters()}

    def keep(x):
        if x.untyped_storage().data_ptr() not in given:
            kept[x.untyped_storage().data_ptr()] = (x.untyped_storage().nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        part(x)
    assert 256 * part.kept * 4 == pytest.approx(sum(size for size, _ in kept.values()), rel=1 / 3)


@pytest.mark.parametrize(
    "key", ["rms_norm_eps", "partial_rotary_factor", "use_qk_norm", "norm_topk_prob", "moe_intermediate_size", "n_group"]
)
def test_a_config_that_differs_from_the_targets_is_found(head, key):
    head.target = GLM
    config, serving = head.export().config | {"dtype": "float32"}, head.serving(3)
    config = {k: v for k, v in config.items() if v is not None}
    assert check_config(config, serving, GLM) == []
    assert any(key in fault for fault in check_config(config | {key: 7}, serving, GLM))
    assert check_config(config, serving, SPEC) != []


def test_its_config_is_read_and_what_is_not_known_is_refused(tmp_path):
    folder = build_tiny_glm4_moe(tmp_path / "target")
    found = spec(folder)
    assert found.moe and found.moe["experts"] == 4 and found.moe["qk_norm"] and found.rope_scaling == PARTIAL
    parts = frozen(folder, torch.float32, "cpu")  # though the module carries copies
    assert parts.embed_VD.shape == parts.lm_head_VD.shape == (512, 64)
    config = json.loads((folder / "config.json").read_text())
    for change, words in (({"n_group": 2}, "n_group=2"), ({"moe_intermediate_size": None}, "moe_intermediate_size")):
        (folder / "config.json").write_text(json.dumps(config | change))
        refused(lambda: spec(folder), words)


def test_a_target_spec_without_its_experts_is_refused():
    with pytest.raises(ValueError, match="target.spec.moe says nothing"):
        build(NATIVE, dataclasses.replace(GLM, moe=None))


def test_other_heads_still_refuse_a_part_of_each_head():
    refused(lambda: plan.build_on_meta(load(["conf=tiny_mtp"]), GLM), "partial_rotary_factor=0.5")


@pytest.mark.slow
@pytest.mark.parametrize("words", [["zero=stage2"], ["zero=stage3"]], ids=["stage2", "stage3"])
def test_two_ranks_give_the_head_of_one(words, tmp_path):
    """Also where an expert is chosen on one rank alone."""
    target, made = build_tiny_glm4_moe(tmp_path / "target"), tmp_path / "made"
    made.mkdir()
    live.make_answers(target, made)
    conf, online = "tiny_glm4_moe_mtp", ["data.states=online", *words]
    one = live.train(live.config(target, made, tmp_path / "one", "train.accum=2", *online, conf=conf), target)
    script = tmp_path / "two.py"
    script.write_text(
        f"import sys\nsys.path[:0] = [{str(plan.ROOT)!r}, {str(plan.ROOT / 'tests')!r}]\n"
        "from pathlib import Path\nimport live as t\n"
        f"target, made, run = map(Path, {[str(target), str(made), str(tmp_path / 'two')]!r})\n"
        f"t.train(t.config(target, made, run, *{online!r}, conf={conf!r}), target)\nt.dist.stop()\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    two = checkpoint.load_head(tmp_path / "two" / "step-000006")
    assert all(torch.allclose(one[key], two[key], rtol=1e-4, atol=1e-6) for key in one)
    bias = next(key for key in one if key.endswith("e_score_correction_bias"))
    stored = load_file(target / "model.safetensors")["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert torch.equal(one[bias], stored) and torch.equal(two[bias], stored)


@pytest.mark.slow
def test_the_whole_way_in_the_engine(tmp_path):
    """Prompts to report: answers are the target's own, and the module accepts what the engine accepts."""
    command = [sys.executable, plan.ROOT / "launch" / "run.py", "conf=tiny_glm4_moe_mtp", *folders(tmp_path)]
    status, out, err, _ = run(command, plan.ROOT)
    assert status == 0, out[-3000:] + err[-3000:]
    report = json.loads((tmp_path / "run" / "eval" / "report.json").read_text())
    offline, cells = report["offline"], [m for m in report["methods"] if m["method"] == "head"]
    assert cells and all(m["lossless"] == 1.0 for m in report["methods"])
    there = [m for m in cells if m["k"] == len(offline["accepted_per_position"])]
    for cell in there:
        assert offline["drafts"] == cell["drafts"]
        for here, engine in zip(offline["accepted_per_position"], cell["accepted_per_position"], strict=True):
            assert 0 <= engine - here <= offline["unjudged_drafts"]
    assert there
