"""The plan of a run: its figures against what really is allocated and written, its sources, and what it says is missing."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import SPEC, batch_of, head_confs, ready, refused
from torch.utils.flop_counter import FlopCounterMode

import heads
from data.answers import write_asked
from data.commands import GIVEN, remember
from data.errors import UserError
from data.identity import asks
from data.store import StoreWriter
from data.target import spec_from_config
from heads.base import Batch, Frozen
from train import inputs, plan
from train.config import ROOT, choices, load
from train.devices import GPUS
from train.plan_table import render, show


@pytest.fixture
def cfg(tmp_path):
    return load(["conf=tiny_eagle3", f"data.responses={tmp_path}/responses", f"data.store={tmp_path}/store"])


def planned(cfg, world=1):
    return plan.plan(cfg, spec_from_config(cfg.target), world)


def answers(folder, split, lengths):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{split}.jsonl").open("w") as f:
        for i, (prompt, response) in enumerate(lengths):
            f.write(json.dumps({"id": f"{i}#0", "prompt_ids": [0] * prompt, "response_ids": [0] * response}) + "\n")


def test_70b_is_planned_from_its_conf_alone():
    found = planned(load(["conf=llama70b_mtp"]), world=8)
    D, inner, kv = 8192, 28672, 1024
    matrices = 2 * D * D + 2 * D * D + 2 * D * kv + 3 * D * inner  # input projection; q and o; k and v; MLP
    assert found.head_parameters == matrices + 5 * D  # and the weights of five norms
    assert found.frozen_parameters == 2 * 128256 * D
    P = found.head_parameters
    assert found.memory["float32 masters"] == 4 * P // 8 and found.memory["optimizer moments"] == 8 * P // 8
    assert found.memory["head weights"] == 2 * P
    assert found.tokens is not None and found.tokens.source == "bound"
    assert found.tokens_per_step == 8 * 8192


@pytest.mark.parametrize(("stage", "split"), [(1, set()), (2, {"gradients"}), (3, {"gradients", "head weights"})])
def test_zero_stages_split_what_they_say(cfg, stage, split):
    cfg.zero = {"stage": stage}
    one, four = planned(cfg, 1).memory, planned(cfg, 4).memory
    smaller = {part for part in one if four[part] < one[part]}
    assert smaller == {"float32 masters", "optimizer moments"} | split


@pytest.mark.parametrize("conf", ["tiny_eagle3", "tiny_mtp"])
@pytest.mark.parametrize("size", [64, 256])
def test_activations_are_about_what_autograd_keeps(conf, size):
    """Within a third: the formula counts tensors, autograd's count depends on how each operation is written."""
    cfg = load([f"conf={conf}"])
    spec = replace(spec_from_config(cfg.target), hidden_size=size, num_heads=size // 32, intermediate_size=3 * size)
    T, D, V = cfg.train.micro_tokens, size, spec.vocab_size
    torch.manual_seed(0)
    head = heads.build(cfg.head, spec)
    head.attach(Frozen(torch.randn(V, D), torch.randn(V, D)))
    offsets = torch.arange(0, T + 1, 64)  # short documents: attention keeps no score matrix in real training either
    batch = Batch(torch.randint(0, V, (T,)), torch.ones(T, dtype=torch.bool), offsets, torch.randn(T, len(head.taps), D), torch.randn(T, D))
    tensors = [*vars(batch).values(), *vars(head.frozen).values(), *head.parameters()]
    given = {x.untyped_storage().data_ptr() for x in tensors if isinstance(x, torch.Tensor)}
    kept = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = (storage.nbytes(), x)  # holding x keeps the address from being used again
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        head.loss(batch)
    counted = sum(size for size, _ in kept.values())
    assert plan.memory(cfg, head, spec, 1)["activations"] == pytest.approx(counted, rel=1 / 3)


def test_logits_of_depths_that_share_a_trained_lm_head_wait_and_are_counted(monkeypatch):
    """b is 2: teacher and scratch 8 bytes an entry, then one depth's logits, or as many as wait."""
    entries = 1024 * 32000
    found = []
    for kept in (0, 3 * entries * 2, 1 << 40):
        monkeypatch.setattr("heads.chunk.KEPT_BYTES", kept)
        for trained in ("true", "false"):
            cfg = load(["conf=llama8b_eagle3", "head.depths=7", f"head.train_lm_head={trained}", "head.draft_vocab_size=32000"])
            spec = spec_from_config(cfg.target)
            found.append(plan.memory(cfg, plan.build_on_meta(cfg, spec), spec, 1)["loss chunk"] / entries)
    assert found == [10, 10, 14, 10, 22, 10]


def test_working_depths_out_again_leaves_one_depth_and_the_inputs_of_all():
    cfg = load(["conf=llama8b_eagle3", "head.depths=7"])
    spec = spec_from_config(cfg.target)
    head = plan.build_on_meta(cfg, spec)
    whole = plan.memory(cfg, head, spec, 1)["activations"]
    cfg.train.recompute = True
    rows, D, kv = 7 * cfg.train.micro_tokens, 4096, 1024
    outputs, inputs = rows * 2 * D * 2, (rows * (D + 2 * kv) + rows // 7 * D) * 2  # bfloat16
    assert plan.memory(cfg, head, spec, 1)["activations"] == (whole - outputs) // 7 + inputs + outputs
    assert planned(cfg).memory["activations"] < whole / 2


def test_a_head_without_such_depths_is_refused():
    with pytest.raises(UserError, match="train.recompute=true.*set it to false"):
        planned(load(["conf=tiny_mtp", "head=medusa", "train.recompute=true"]))


@pytest.mark.parametrize("name", sorted(head_confs()))
def test_operations_are_about_those_that_torch_counts(name):
    """Every head, every position supervised: an upper bound, but no multiple. Ends of documents have no label at deep depths, first layers
    pass no gradient on to the target's states, and taps are fused once for all depths."""
    head = ready(head_confs()[name] | ({"anchors": 8} if "anchors" in head_confs()[name] else {}), torch.float32).train()
    batch = batch_of(head, (32,) * 8, torch.float32)
    batch.loss_mask_T[:] = True
    with FlopCounterMode(display=False) as counter:
        head.loss(batch).total.backward()
    assert 0.95 < 256 * plan.flops_per_token(head, SPEC, 32, 256) / counter.get_total_flops() < 1.6


def test_tokens_are_bounded_then_reckoned_then_counted(cfg, tmp_path):
    """24 training prompts of at most 256 tokens, of which at most 32 are an answer."""
    assert plan.count_tokens(cfg, "train") == plan.Tokens(24 * 256, 24 * 32, "bound")
    answers(tmp_path / "responses", "train", [(10, 20)] * 12)  # half of them: the rest is taken to be alike
    assert plan.count_tokens(cfg, "train") == plan.Tokens(24 * 30, 24 * 20, "answers")
    answers(tmp_path / "responses", "train", [(10, 20)] * 23 + [(250, 32)])
    assert plan.count_tokens(cfg, "train") == plan.Tokens(23 * 30 + 256, 23 * 20 + 6, "answers")
    write_store(tmp_path / "store" / "train", [5, 9])
    assert plan.count_tokens(cfg, "train") == plan.Tokens(14, 12, "store")


def test_answers_to_other_prompts_are_not_counted(cfg, tmp_path):
    folder = tmp_path / "responses"
    answers(folder, "train", [(10, 20)] * 4 + [(100, 100)] * 20)
    cfg.data.limit = 4
    write_asked(folder / "train.jsonl", asks(cfg.data, "train"), [f"{i}#0" for i in range(4)])
    assert plan.count_tokens(cfg, "train") == plan.Tokens(4 * 30, 4 * 20, "answers")


def test_a_document_over_the_budget_is_a_batch_by_itself(cfg, capsys):
    whole = planned(cfg)
    cfg.train.micro_tokens = 16
    found = planned(cfg, 2)
    assert found.tokens_per_step == 2 * cfg.data.max_length and not whole.over_budget
    show([render(found, GPUS["h100"])])
    cfg.train.micro_tokens = cfg.data.max_length
    assert found.memory == planned(cfg, 2).memory
    assert (
        "of up to 512 tokens: at most" in (said := " ".join(capsys.readouterr().out.replace("│", " ").split()))
        and "train.micro_tokens" in said
    )


def test_the_documented_window_fits_every_large_conf_on_eight_gpus():
    line = next(x for x in (ROOT / "docs" / "data.md").read_text().splitlines() if "launch/train.py" in x and "data.window_gb" in x)
    words = [word for word in line.split() if "=" in word and not word.startswith("conf=")]
    for name in (name for name in choices("conf") if name.startswith("llama")):
        assert planned(load([f"conf={name}", *words]), 8).window_gb == 200
    without = load(["conf=llama70b_mtp", *(word for word in words if "save_every" not in word)])
    whole = "or data.window_gb=null, for all of the training's states take 671.29 GB"  # a window of more would help nobody
    refused(lambda: planned(without, 8), "on 8 GPUs", f"set train.save_every=178 or less, {whole}")


def test_prompts_without_a_limit_are_counted_where_they_are_local_and_unknown_where_not(cfg):
    cfg.data.limit = None
    known = plan.count_tokens(cfg, "train")
    assert known is not None and known.total % 256 == 0 and known.total > 24 * 256
    cfg.data.prompts = ["hf:someone/something"]
    assert plan.count_tokens(cfg, "train") is None
    assert planned(cfg).store_bytes is None


def write_store(folder, lengths, taps=(0, 1, 2), D=64):
    manifest = {
        "target": {"id": "builtin:tiny", "revision": None, "fingerprint": "f", "dtype": "float32", "quantisation": None},
        "tokenizer_hash": "k",
        "template_hash": "m",
        "taps": list(taps),
        "hidden_size": D,
        "last": "supervised",
        "dtype": "float32",
        "engine": {"name": "test", "version": "0"},
    }
    writer = StoreWriter(folder, manifest)
    for i, n in enumerate(lengths):
        mask = torch.arange(n) >= 1
        writer.add(f"{i}#0", torch.arange(n), mask, torch.randn(n, len(taps), D), torch.randn(n, D))
    writer.close()


def test_store_size_is_the_size_on_disk(cfg, tmp_path):
    for split in inputs.SPLITS:
        write_store(tmp_path / "store" / split, [200, 300, 255] * 4)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "store").rglob("shard-*"))
    assert planned(cfg).store_bytes == pytest.approx(on_disk, rel=0.01)


def test_what_is_missing_is_named_with_the_commands_that_make_it(cfg, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(plan.ROOT)
    monkeypatch.setenv(GIVEN, "")
    remember(["conf=tiny_eagle3", "train.steps=5", "dry_run=true"])
    respond, capture = (f"python launch/{stage}.py conf=tiny_eagle3 train.steps=5" for stage in ("respond", "capture"))
    with pytest.raises(UserError) as caught:
        inputs.require_inputs(cfg)
    assert f"{respond} && {capture}" in str(caught.value) and f"{tmp_path}/store/heldout" in str(caught.value)
    for split in inputs.SPLITS:
        answers(tmp_path / "responses", split, [(3, 4)])
    assert inputs.next_commands(cfg) == [capture]
    for split in inputs.SPLITS:
        write_store(tmp_path / "store" / split, [9])
    inputs.require_inputs(cfg)
    assert inputs.missing_inputs(cfg) == []


def test_a_store_that_was_not_finished_is_missing(cfg, tmp_path):
    write_store(tmp_path / "store" / "train", [9])
    path = tmp_path / "store" / "train" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"closed": False}))
    assert len(inputs.missing_inputs(cfg)) == 2


def test_a_head_that_does_not_build_is_refused_by_its_section(cfg):
    cfg.head["taps"] = [0, 1, 99]
    with pytest.raises(UserError, match="^head: "):
        planned(cfg)
