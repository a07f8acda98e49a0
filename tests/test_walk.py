"""The chain that the training walks at each look at the held-out answers: the figures of an evaluation, at no cost to the training."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import SPEC, head_confs, ready, refused
from live import LONGEST, config, make_answers, train, write_store
from test_report import made as made_report

from data.check import Reference
from data.forward import Forward
from data.online import Answers
from data.store import Store
from data.target import frozen, spec
from eval.chain import along_stored, most_drafts, offline, spread, while_training
from eval.report import write
from heads import build
from heads.base import DraftHead
from tests.toy import read_metrics
from train.checkpoint import load_head
from train.log import chain_summary, console_line, flat

CPU = torch.device("cpu")


def greedy(target: Reference, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor(prompt)
    for _ in range(count):
        ids = torch.cat([ids, (target.states(ids)[1][-1] @ target.lm_head_VD.T).argmax()[None]])
    return ids[len(prompt) :].tolist()


@pytest.fixture(scope="module")
def easy(target, tmp_path_factory):
    """The target's own greedy answers, of which a head learns some in a few steps."""
    folder = make_answers(target, tmp_path_factory.mktemp("easy"))
    reference = Reference(target)
    for path in folder.glob("*.jsonl"):
        answers = [json.loads(line) for line in path.read_text().splitlines()]
        for answer in answers:
            answer["response_ids"] = greedy(reference, answer["prompt_ids"], 24)
        path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return folder


def chain_of(record: dict) -> dict:
    return {key: value for key, value in record.items() if key.startswith("chain_")}


@pytest.mark.parametrize("conf", ["tiny_eagle3", "tiny_mtp", "tiny_medusa", "tiny_dspark", "tiny_pard"])
def test_it_is_what_the_chain_gives_and_changes_no_loss(target, easy, tmp_path, conf):
    """Recurrent heads, last-state heads, block heads, language models, with states online."""
    words = "data.states=online train.steps=40 train.val_every=20 train.save_every=40 optim.lr=0.02 optim.adam_lr=0.02 eval.k=3".split()
    without = config(target, easy, tmp_path / "without", *words, "train.chain_docs=0", conf=conf)
    cfg = config(target, easy, tmp_path / "with", *words, "train.chain_docs=3", conf=conf)
    weights = [train(each, target) for each in (without, cfg)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    losses = [[line["loss"] for line in read_metrics(tmp_path / name)] for name in ("without", "with")]
    assert losses[0] == losses[1] and len(losses[0]) == 40
    looks = [read_metrics(tmp_path / name, "val") for name in ("without", "with")]
    assert [look["step"] for look in looks[1]] == [20, 40]
    for plain, walked in zip(*looks, strict=True):
        assert chain_of(walked) and plain == {key: value for key, value in walked.items() if key not in chain_of(walked)}

    head = build(cfg.head, spec(target)).eval()
    head.load_state_dict(weights[1])
    head.attach(frozen(target, torch.float32, "cpu"))
    forward = Forward(target, sorted(set(head.taps)), torch.float32, "cpu")
    heldout = Answers(easy / "heldout.jsonl", LONGEST, forward, head.needs_last, {}, head.kv_layers)
    answers = []
    for i in spread(heldout, 3):
        ids, start = heldout.tokens(i)[0].tolist(), int(heldout.first_labels[i])
        answers.append({"id": heldout.ids[i], "prompt_ids": ids[:start], "response_ids": ids[start:]})
    assert len(answers) == 3
    found, last = offline(head, heldout, answers, 3, CPU, torch.float32), looks[1][-1]
    assert last["chain_acceptance_length"] == found["acceptance_length"]
    assert last["chain_acceptance_per_position"] == found["acceptance_per_position"]
    assert last["chain_passes"] == found["drafts"] > 0
    assert last["chain_acceptance_length"] > 1, "else nothing was compared"


def test_the_store_of_a_training_is_walked_up_to_its_length(target, made, tmp_path):
    """A store may hold longer sequences than the run reads."""
    cfg = config(target, made, tmp_path / "run", f"data.store={tmp_path}/store", "train.chain_docs=2", "eval.k=[1,2]")
    write_store(cfg, target, "all", (0, 1, 2))
    cfg.data.max_length = 17
    train(cfg, target)
    last = read_metrics(tmp_path / "run", "val")[-1]
    store, head = Store(tmp_path / "store" / "heldout"), build(cfg.head, spec(target)).eval()
    head.load_state_dict(load_head(tmp_path / "run" / "step-000006"))
    head.attach(frozen(target, torch.float32, "cpu"))
    counts = along_stored(head, store, spread(store, 2), 2, 17, CPU, torch.float32)
    assert counts.output_tokens == sum(min(17, int(store.lengths[i])) - int(store.first_labels[i]) for i in spread(store, 2))
    assert (last["chain_passes"], len(last["chain_acceptance_per_position"])) == (counts.drafts, 2)
    assert last["chain_acceptance_length"] == 1 + counts.accepted / counts.drafts


class Silent(DraftHead):
    """It cannot draft."""


def test_what_is_not_walked(target, made, tmp_path):
    heldout = Answers(made / "heldout.jsonl", LONGEST, None, "none", {})
    cfg = config(target, made, tmp_path / "run", "train.chain_docs=5")
    head = ready(head_confs()["medusa"], torch.float32)
    assert while_training(cfg, head, heldout, 0, 1) and while_training(cfg, Silent(), heldout, 0, 1) is None
    cfg.train.chain_docs = 0
    assert while_training(cfg, head, heldout, 0, 1) is None
    assert chain_summary(torch.zeros(4)) == {}, "answers of one token have no pass"
    refused(lambda: config(target, made, tmp_path, "train.chain_docs=-1"), "train.chain_docs=-1", "0 or more")


def test_a_head_is_asked_for_no_more_drafts_than_it_makes():
    confs = head_confs()
    assert most_drafts(ready(confs["medusa"] | {"depths": 2}), 5) == 2
    assert most_drafts(ready(confs["dspark"] | {"block_size": 3}), 9) == ready(confs["dspark"] | {"block_size": 3}).depths
    assert most_drafts(ready(confs["eagle3"]), 9) == 9, "it goes on from its own output"
    assert SPEC.num_heads * SPEC.head_dim != SPEC.hidden_size and most_drafts(ready(confs["mtp"] | {"depths": 2}), 3) == 2


def test_every_place_shows_it(tmp_path):
    record = {"loss": 1.0, "acceptance_length": 1.9} | chain_summary(torch.tensor([10.0, 6.0, 2.0]))
    assert record["chain_acceptance_length"] == 1.8 and record["chain_passes"] == 10
    points = {"val/chain_acceptance_length": 1.8, "val/chain_acceptance_per_position_0": 0.6, "val/chain_acceptance_per_position_1": 0.2}
    assert points.items() <= flat("val", record).items()
    assert console_line("val", 5, 10, record) == "held out 5/10  loss 1.0000  acceptance length 1.900  chain 1.800 (0.600 0.200)"
    earlier = record | chain_summary(torch.tensor([10.0, 5.0]))  # with another eval.k
    lines = [{"kind": "val", "step": step, **line} for step, line in ((5, earlier), (10, record))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(made_report(), tmp_path / "eval")
    text = (tmp_path / "eval" / "report.html").read_text()
    assert all(words in text for words in ("offline chain", "chain, last 1.80", "teacher-forced, last 1.90", "draft 2, last 0.20"))
