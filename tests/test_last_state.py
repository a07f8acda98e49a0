"""The feed-forward heads (Medusa, Hydra heads, IBM's MLP) against an independent float64 program: one anchor at a time, loops, no
shared code. And how they start, what they refuse, and what their exports hold."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import SPEC, batch_of, document, ready
from safetensors.torch import load_file, save_file
from test_recurrence import block

from data.builtin import build_tiny
from data.errors import UserError
from data.target import frozen, spec
from eval.export import export_head, validate_export
from heads import build

MEDUSA = {"_target_": "heads.medusa.Medusa"}
HYDRA = {"_target_": "heads.hydra_heads.HydraHeads"}
PLUS = HYDRA | {"prefix_layer": True}
MLP = {"_target_": "heads.mlp_speculator.MLPSpeculator"}
CASES = {
    "medusa": MEDUSA,
    "medusa_two_layers_own_lm_heads": MEDUSA | {"num_layers": 2, "train_lm_head": True, "depths": 3},
    "hydra": HYDRA,
    "hydra_three_layers_own_lm_heads": HYDRA | {"num_layers": 3, "train_lm_head": True, "depths": 3},
    "hydra_plus": HYDRA | {"num_layers": 2, "prefix_layer": True},
    "mlp_tied": MLP,
    "mlp_tied_narrow_unscaled": MLP | {"inner_dim": 24, "scale_input": False, "depths": 2},
    "mlp_untied_wide": MLP | {"inner_dim": 96, "tie_weights": False, "depths": 3},
}


def affine(w, name, x):
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def residual(w, name, x):
    y = affine(w, f"{name}.linear", x)
    skip = affine(w, f"{name}.res_connection", x) if f"{name}.res_connection.weight" in w else x
    return skip + y * torch.sigmoid(y)


def mlp_logits(head, w, z, tokens):
    K, d = head.depths, head.inner_dim
    w_s = 0.5 ** (1 / (2 * K))
    w_e = math.sqrt(1 - w_s**2) * math.sqrt(d / 2)
    s, out = z, []
    if head.scale_input:
        s = z / math.sqrt(float(z.pow(2).mean()) + 1e-6) / math.sqrt(2)
    for k, token in enumerate(tokens):
        i, j = (0, min(k, 1)) if head.tied else (k, k)
        # the sum as in the paper's program, over w_s: its scale is lost in the norm but for the norm's epsilon
        y = (w_s * (w[f"proj.{j}.weight"] @ s) + w_e * w[f"emb.{i}.weight"][token]) / w_s
        y = y / torch.sqrt((y * y).mean() + 1e-6) * w[f"ln.{i}.weight"] + w[f"ln.{i}.bias"]
        s = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        out.append(w[f"head.{i}.weight"] @ s)
    return out


def states_of(last, w):
    """What depth 0 of each anchor of one document is told: the last states, or Hydra++'s layer over them."""
    return block(w, "prefix_layer", last) if "prefix_layer.input_layernorm.weight" in w else last


def logits_of(head, z, tokens, w):
    """Logits [V] of every depth for one anchor: z its state, tokens what each depth is told, x_{t+1} first."""
    if "emb.0.weight" in w:
        return mlp_logits(head, w, z, tokens)
    out, hydra = [], "blocks.0.0.res_connection.weight" in w
    for k in range(len(tokens)):
        x = torch.cat([z, *(head.frozen.embed_VD[token] for token in tokens[: k + 1])]) if hydra else z
        for j in range(head.num_layers):
            x = residual(w, f"blocks.{k}.{j}", x)
        out.append(w.get(f"lm_heads.{k}.weight", head.frozen.lm_head_VD) @ x)
    return out


@pytest.fixture(params=sorted(CASES))
def pair(request):
    head = ready(CASES[request.param])
    return head, batch_of(head, (8, 6))


def test_drafts_equal_a_decode_of_one_anchor_at_a_time(pair):
    head, batch = pair
    drafts, log_q = head.propose(batch, head.depths)
    for start, single in ((0, document(batch, 0)), (8, document(batch, 1))):
        states = states_of(single.last_TD, head.state_dict())
        for t in range(len(single.token_ids_T) - 1):
            fed = [int(single.token_ids_T[t + 1]), *drafts[start + t].tolist()]
            for k, logits in enumerate(logits_of(head, states[t], fed[: head.depths], head.state_dict())):
                assert int(logits.argmax()) == int(drafts[start + t, k])
                torch.testing.assert_close(logits.log_softmax(-1).max().float(), log_q[start + t, k], rtol=1e-4, atol=1e-4)


def test_loss_and_gradients_equal_a_naive_loop(pair):
    """Every depth weighted otherwise, so that a gradient that ends at another depth's lm_head shows."""
    head, batch = pair
    w = {name: value.detach().clone().requires_grad_() for name, value in head.named_parameters()}
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(head.depths)]
    for single in (document(batch, 0), document(batch, 1)):
        x, n, states = single.token_ids_T.tolist(), len(single.token_ids_T), states_of(single.last_TD, w)
        for t in range(n - 2):
            told = [x[min(t + 1 + k, n - 1)] for k in range(head.depths)]
            for k, logits in enumerate(logits_of(head, states[t], told, w)):
                if t + 2 + k < n and single.loss_mask_T[t + 2 + k]:
                    log_p = (head.frozen.lm_head_VD @ single.last_TD[t + 1 + k]).log_softmax(-1)
                    sums[k] = sums[k] + (log_p.exp() * (log_p - logits.log_softmax(-1))).sum()
    weight_K = torch.linspace(0.5, 1.5, head.depths)
    out = head.loss(batch, weight_K)
    torch.testing.assert_close(out.loss_K.double(), torch.stack(sums).detach(), rtol=1e-5, atol=1e-5)
    out.total.backward()
    torch.stack([weight * value for weight, value in zip(weight_K, sums, strict=True)]).sum().backward()
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(parameter.grad, w[name].grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("conf", [MEDUSA, HYDRA, PLUS, MEDUSA | {"train_lm_head": True, "num_layers": 2}, HYDRA | {"train_lm_head": True}])
def test_residual_heads_start_as_the_targets_own_distribution(conf):
    trained = ready(conf)
    head = build(conf, SPEC).double()
    head.attach(trained.frozen)
    head.start_from(trained.frozen)
    batch = batch_of(head)
    drafts, _ = head.propose(batch, head.depths)
    for k in range(head.depths):
        assert torch.equal(drafts[:, k], (batch.last_TD @ head.frozen.lm_head_VD.T).argmax(-1))
        assert torch.equal(head.head_rows(k), head.frozen.lm_head_VD)


@pytest.mark.parametrize(
    ("conf", "count"), [(MEDUSA, 4 * 3 * 2), (HYDRA, 4 * (4 + 2 * 2)), (MLP | {"tie_weights": False}, 4 * 5), (MLP, 6)]
)
def test_layers_have_parameters_of_their_own(conf, count):
    """`[Block()] * n` would share one block among all layers."""
    head = build(conf | ({} if conf["_target_"] == MLP["_target_"] else {"num_layers": 3}), SPEC)
    assert len({p.data_ptr() for p in head.parameters()}) == len(list(head.parameters())) == count


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (MEDUSA | {"num_layers": 0}, "head.num_layers must be at least 1"),
        (HYDRA | {"num_layers": -1}, "head.num_layers must be at least 1"),
        (MEDUSA | {"depths": 0}, "head.depths"),
        (HYDRA | {"loss": "mse"}, "head.loss=mse"),
        (MLP | {"inner_dim": 0}, "head.inner_dim must be null or at least 1"),
        (MLP | {"depths": 1}, "head.tie_weights needs head.depths"),
    ],
)
def test_bad_settings_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        build(change, SPEC)


@pytest.mark.parametrize("conf", [MEDUSA, HYDRA, MLP])
def test_more_drafts_than_depths_are_refused(conf):
    head = ready(conf)
    for call in (lambda: head.serving(5), lambda: head.propose(batch_of(head), 5), lambda: head.serving(0)):
        with pytest.raises(ValueError, match="head.depths=4 makes 1 to 4 drafts a pass, eval.k="):
            call()
    assert head.serving(2)["num_speculative_tokens"] == 2


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("target") / "tiny")


def export(conf, target_dir, out, dtype=torch.float32):
    torch.manual_seed(0)
    head = build(conf, spec(target_dir))
    parts = frozen(target_dir, torch.float32, "cpu")
    export_head(head, parts, target_dir, out, dtype=dtype, head_cfg=conf, k=2, provenance={"checkpoint": "step-000001"})
    return head


@pytest.mark.parametrize("name", CASES)
def test_an_export_holds_every_parameter_and_passes_its_own_check(name, target_dir, tmp_path):
    head = export(CASES[name], target_dir, tmp_path / "out", torch.bfloat16)
    described, stored = head.export(), load_file(tmp_path / "out" / "model.safetensors")
    assert set(stored) == set(described.names.values()) | set(described.extra)
    assert {ours for ours, _ in head.named_parameters()} == set(described.names)
    for ours, theirs in described.names.items():
        assert torch.equal(stored[theirs], head.state_dict()[ours].bfloat16()), theirs
    validate_export(tmp_path / "out", spec(target_dir))


def test_the_state_of_the_plugin_holds_all_tokens_and_divides_by_the_targets_heads():
    for heads in (1, 4, 9, 28):
        for depths in (1, 4, 9):
            target = dataclasses.replace(SPEC, num_heads=heads)
            config = build(HYDRA | {"depths": depths}, target).export().config
            assert config["hidden_size"] >= SPEC.hidden_size + 3 * (depths - 1) + 1
            assert config["hidden_size"] % heads == 0 and config["head_dim"] * heads == config["hidden_size"]


def drop(name):
    return lambda config, tensors: tensors.pop(name)


def setting(**values):
    return lambda config, tensors: config.update(values)


def draft(**values):
    return lambda config, tensors: config["draft_config"].update(values)


FAULTS = {
    "missing lm_head": (MEDUSA, drop("lm_head.weight"), "missing tensor lm_head.weight"),
    "missing bias": (MEDUSA, drop("blocks.1.layers.0.bias"), "missing tensor blocks.1.layers.0.bias"),
    "bias that is dropped": (MEDUSA, setting(medusa_fc_bias=False), "blocks.0.layers.0.bias has no place"),
    "lm_heads of its own that are not there": (MEDUSA, setting(original_lm_head=False), "missing tensor lm_heads.0.weight"),
    "reduced vocabulary": (MEDUSA, setting(truncated_vocab_size=100), "truncated_vocab_size is 100, it must be 512"),
    "no layers stated": (MEDUSA, lambda config, tensors: config.pop("num_hidden_layers"), "num_hidden_layers is not set"),
    "fewer heads than drafts": (MEDUSA, setting(num_heads=1), "num_speculative_tokens is 2, the head has 1"),
    "lost block": (HYDRA, drop("blocks.2.0.res_connection.weight"), "missing tensor blocks.2.0.res_connection.weight"),
    "aux states": (HYDRA, setting(eagle_config={}), "eagle_config is {}, it must be"),
    "lost part of the prefix layer": (PLUS, drop("prefix_layer.self_attn.k_proj.weight"), "missing tensor prefix_layer.self_attn.k_proj"),
    "state too narrow": (HYDRA, setting(hidden_size=72), "hidden_size is 72, the state needs 74"),
    "another target": (HYDRA, draft(target_hidden_size=32), "target_hidden_size is 32, it must be 64"),
    "unknown mode": (MLP, draft(step_mode="fast"), "step_mode is fast, it must be host or tensor"),
    "untied, of tied weights": (MLP, draft(tie_weights=False), "missing tensor proj.2.weight"),
    "no scale stated": (MLP, draft(scale_input=None), "scale_input is not set"),
    "another architecture": (MLP, setting(architectures=["Eagle3HydraDraft"]), "num_layers is not set"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_export_is_refused(fault, target_dir, tmp_path):
    conf, edit, message = FAULTS[fault]
    out = tmp_path / "out"
    export(conf, target_dir, out)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    edit(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(UserError, match=message):
        validate_export(out, spec(target_dir))


def test_the_reference_blocks_are_the_heads():
    """Guards the reference itself: SiLU and GELU as torch has them."""
    x = torch.linspace(-4, 4, 9, dtype=torch.float64)
    torch.testing.assert_close(x * torch.sigmoid(x), F.silu(x))
    torch.testing.assert_close(x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), F.gelu(x))
