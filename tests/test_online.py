"""States worked out while training: the batches of a store, the same head, the same resume, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import refused
from live import LONGEST, config, train, write_store
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode

from data.batch import Batches
from data.forward import Forward
from data.identity import unfinished
from data.online import Answers
from data.store import Store
from data.target import spec, spec_from_config
from heads import build
from tests.toy import read_metrics
from train import checkpoint, dist, inputs, plan, setup, sizes
from train.config import load


@pytest.mark.parametrize(("last", "taps"), [("supervised", (0, 1, 2)), ("all", ()), ("none", (2, 0))])
def test_its_batches_are_those_of_a_store(target, made, tmp_path, last, taps):
    cfg = config(target, made, tmp_path / "run", f"data.store={tmp_path}/store")
    write_store(cfg, target, last, taps)
    live = Answers(made / "train.jsonl", LONGEST, Forward(target, taps, torch.float32, "cpu"), last, {})
    store = Store(tmp_path / "store" / "train")
    assert live.ids == store.ids and live.manifest["supervised_tokens"] == store.manifest["supervised_tokens"]
    assert (live.lengths == store.lengths).all() and (live.first_labels == store.first_labels).all()
    for limit in (LONGEST, 20):
        pair = [Batches(source, tuple(sorted(taps)), 60, 5, 0, 1, limit) for source in (live, store)]
        for a, b in zip(*(source.step(3, 4) for source in pair), strict=True):
            for x, y in zip(vars(a).values(), vars(b).values(), strict=True):
                assert (x is None or x == []) == (y is None or y == [])
                assert x is None or x == [] or (x.dtype == y.dtype and x.device == y.device and torch.allclose(x, y, rtol=0, atol=1e-5))


@pytest.mark.parametrize("conf", ["tiny_eagle3", "tiny_mtp"])
def test_the_head_is_that_of_a_store_and_of_a_resume(target, made, tmp_path, conf):
    cfg = config(target, made, tmp_path / "store", conf=conf)
    write_store(cfg, target, "all", (0, 1, 2))
    stored = train(cfg, target)
    live = train(config(target, made, tmp_path / "live", "data.states=online", conf=conf), target)
    assert all(torch.allclose(live[key], stored[key], rtol=1e-5, atol=1e-6) for key in stored)
    again = config(target, made, tmp_path / "again", "data.states=online", conf=conf)
    with pytest.raises(RuntimeError, match="went away"):
        train(again, target, stop_before=4)
    resumed = train(again, target)
    assert all(torch.equal(live[key], resumed[key]) for key in live)


def test_a_draft_vocabulary_is_counted_in_the_answers(target, made, tmp_path):
    cfg = config(target, made, tmp_path / "run", "data.states=online", "head.draft_vocab_size=50")
    head = build(cfg.head, spec(target))
    store, _ = setup.open_states(cfg, head, target)
    dist.start(1)
    setup.equip(cfg, head, target, store)
    labels = {int(x) for i in range(len(store)) for x, on in zip(*store.tokens(i), strict=True) if on}
    assert set(head.get_buffer("draft_ids_U").tolist()) <= labels


def test_a_head_that_reads_no_states_runs_no_target(target, made, tmp_path, monkeypatch):
    cfg = config(target, made, tmp_path / "run", "data.states=online", conf="tiny_pard")
    monkeypatch.setattr(setup, "Forward", None)
    head = build(cfg.head, spec(target))
    (batch,) = setup.open_batches(cfg, head, setup.open_states(cfg, head, target)[0]).step(0, 1)
    assert batch.taps_TLD is None and batch.last_TD is None
    assert "target" not in plan.plan(cfg, spec(target), 1).memory


def test_states_of_the_targets_dtype_do_not_depend_on_the_batch(target, made):
    live = Answers(made / "train.jsonl", LONGEST, Forward(target, (1,), torch.bfloat16, "cpu"), "all", {})
    alone = live.get(3, (1,))
    (packed,) = Batches(live, (1,), 10_000, 5, 0, 1, LONGEST).step(0, 1)
    starts = [s for s in packed.offsets_S1[:-1].tolist() if torch.equal(packed.token_ids_T[s : s + 3], alone["token_ids"][:3])]
    assert alone["taps"].dtype == alone["last"].dtype == torch.bfloat16
    assert any(torch.equal(packed.taps_TLD[s : s + len(alone["taps"])], alone["taps"]) for s in starts)


@pytest.mark.slow
def test_two_ranks_give_the_head_of_one(target, made, tmp_path):
    one = train(config(target, made, tmp_path / "one", "data.states=online", "train.accum=2"), target)
    script = tmp_path / "two.py"
    script.write_text(
        f"import sys\nsys.path[:0] = [{str(plan.ROOT)!r}, {str(plan.ROOT / 'tests')!r}]\n"
        "from pathlib import Path\nimport live as t\n"
        f"target, made, run = map(Path, {[str(target), str(made), str(tmp_path / 'two')]!r})\n"
        "t.train(t.config(target, made, run, 'data.states=online'), target)\nt.dist.stop()\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    two = checkpoint.load_head(tmp_path / "two" / "step-000006")
    assert all(torch.allclose(one[key], two[key], rtol=1e-4, atol=1e-6) for key in one)
    looks = [read_metrics(tmp_path / name, "val")[-1] for name in ("one", "two")]
    chains = [{key: value for key, value in look.items() if key.startswith("chain_")} for look in looks]
    assert chains[0] and chains[0] == chains[1], "each rank walks its share"


def test_what_is_missing_wrong_or_unfinished_is_named(target, made, tmp_path):
    cfg = config(target, made, tmp_path / "run", "data.states=online")
    head = build(cfg.head, spec(target))
    (tmp_path / "copy").mkdir()
    for path in made.glob("*.json*"):
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    cfg.data.responses = str(tmp_path / "copy")
    inputs.require_inputs(cfg)
    unfinished(tmp_path / "copy" / "train.jsonl").touch()
    refused(lambda: setup.open_states(cfg, head, target), "train.jsonl", "launch/respond.py")
    unfinished(tmp_path / "copy" / "train.jsonl").unlink()
    cfg.target.dtype = "bfloat16"  # other states than the answers' target would have
    refused(lambda: setup.open_states(cfg, head, target), "another target", "dtype")
    (tmp_path / "copy" / "heldout.jsonl").unlink()
    refused(lambda: inputs.require_inputs(cfg), "heldout.jsonl (answers)", "launch/respond.py")
    with pytest.raises(Exception, match=r"^((?!capture\.py).)*$"):
        inputs.require_inputs(cfg)
    refused(lambda: load(["conf=tiny_mtp", "data.states=disk"]), "data.states=disk", "store, online")


def test_states_that_are_not_finite_are_refused_by_name(target, made, monkeypatch):
    live = Answers(made / "train.jsonl", LONGEST, Forward(target, (1,), torch.float32, "cpu"), "all", {})
    assert live.forward is not None
    right = live.forward.states
    monkeypatch.setattr(live.forward, "states", lambda ids: (right(ids)[0] / 0, right(ids)[1]))
    refused(lambda: live.get(2, (1,)), "train2#0", "taps", "target.dtype=float32")


def test_a_target_that_does_not_load_is_refused(target, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows"}')
    refused(lambda: Forward(tmp_path, (1,), torch.float32, "cpu"), str(tmp_path), "transformers")

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    refused(lambda: Forward(target, (1,), torch.float32, "cpu"), str(target), "no room")


def test_the_plan_counts_the_target(target, made, tmp_path):
    cfg = config(target, made, tmp_path / "run", "data.states=online")
    dims = spec(target)
    whole = config(target, made, tmp_path / "run", f"data.store={tmp_path}/store")
    online, stored = plan.plan(cfg, dims, 2), plan.plan(whole, dims, 2)
    with safe_open(target / "model.safetensors", "pt") as f:
        held = sum(f.get_tensor(name).numel() for name in f.keys())  # noqa: SIM118
    assert sizes.target_parameters(dims) == held and online.memory["target"] >= 4 * held
    assert online.store_bytes == 0 and stored.store_bytes and inputs.missing_inputs(cfg) == []
    total = sum(plan.count_tokens(whole, split).total for split in inputs.SPLITS)
    assert online.capture_flops == 0 and stored.capture_flops == sizes.target_flops(dims, LONGEST) * total
    forward, ids = Forward(target, (), torch.float32, "cpu"), torch.arange(32)
    with FlopCounterMode(display=False) as counter:
        forward.states(ids)
    assert 32 * sizes.target_flops(dims, 32) == pytest.approx(counter.get_total_flops(), rel=0.1)
    per_token = (online.flops - stored.flops) / (online.steps * online.tokens_per_step)
    assert per_token == sizes.target_flops(dims, cfg.data.max_length)


def test_the_plan_of_an_embedded_target_is_its_size():
    """135 million, as its name says."""
    dims = spec_from_config(load(["conf=smollm_eagle3"]).target)
    assert sizes.target_parameters(dims) == pytest.approx(134.5e6, rel=0.01)
