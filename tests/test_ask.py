"""Who is asked what: given answers and their masks, from the data set to the store; held-out answers are always the target's own."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from conftest import refused, store_manifest
from test_chat import CHATML, tokenizer_for

from data import ask as ask_module
from data import engine, masks
from data.answers import Request, asked_answers, collect, mask_of, read_answers, runs, spans_of
from data.ask import take_given
from data.identity import unfinished
from data.record import ChatRecord
from data.store import Store
from train.config import DataConfig, TargetConfig

THREE = ["Hi", "Hello there.", "Why?", "Because.", "Thanks"]  # ends with the user: the tail is not kept


def chat(name: str, *contents: str, split: str = "train") -> ChatRecord:
    turns = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return ChatRecord(name, turns, {"category": "chat", "split": split})


def test_a_mask_and_its_spans_say_the_same():
    for text in ("", "0", "1", "0110", "1011", "000111"):
        mask = [c == "1" for c in text]
        assert mask_of(runs(mask), len(mask)) == mask
    answer = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5, 6, 7], "spans": [[2, 4], [6, 7]]}
    assert [spans_of(answer, n) for n in (9, 7, 6, 3, 2)] == [[[2, 4], [6, 7]], [[2, 4], [6, 7]], [[2, 4]], [[2, 3]], []]
    del answer["spans"]
    assert spans_of(answer, 5) == [[2, 5]] and spans_of(answer, 2) == []


def test_given_answers_supervise_each_assistant_turn_up_to_the_last(tmp_path, capsys):
    tokenizer, out = tokenizer_for(CHATML), tmp_path / "train.jsonl"
    records = [chat("a", *THREE), chat("no answer", "Hi"), chat("b", "blue", "blue light")]
    take_given(tokenizer, records, out, {"answers": "given"}, {})
    answers = {a["id"]: a for a in read_answers(out)[0]}
    assert list(answers) == ["a#0", "b#0"] and not list(tmp_path.glob("*.tmp"))
    ids, mask = masks.cut(answers["a#0"], 1000)
    assert "Thanks" not in tokenizer.decode(ids) and mask[-1]
    said = [tokenizer.decode(ids[a:b]) for a, b in runs(mask)]
    assert said == ["Hello there.<|im_end|>", "Because.<|im_end|>"]
    assert tokenizer.decode(answers["a#0"]["prompt_ids"]).endswith("Hi<|im_end|>\n<|im_start|>assistant\n")
    assert masks.statistics(list(answers.values()), 1000)["all"]["ended"]["given"] == 1
    left_out = json.loads((tmp_path / "train.quarantine.jsonl").read_text())
    assert left_out["id"] == "no answer" and "no supervised token" in left_out["reason"]
    assert "1 of 3 conversations left out" in capsys.readouterr().out
    take_given(tokenizer, records[:1], out, {"answers": "given"}, {})  # made anew from what there is now
    assert len(read_answers(out)[0]) == 1 and not (tmp_path / "train.quarantine.jsonl").exists()
    refused(lambda: take_given(tokenizer, records, out, {"answers": "other"}, {}), "answers", "given", "data.responses")
    refused(lambda: take_given(tokenizer, records[1:2], tmp_path / "none.jsonl", {}, {}), "data.answers=given: none of 1", "no answer")
    assert not (tmp_path / "none.jsonl").exists()


def test_a_store_of_given_answers_has_their_masks(tmp_path):
    tokenizer, out = tokenizer_for(CHATML), tmp_path / "train.jsonl"
    take_given(tokenizer, [chat("a", *THREE), chat("b", "blue", "blue light")], out, {}, {})
    settings = {"responses": out, "store_dir": tmp_path / "store", "taps": (), "last": "none", "cap_gb": 1.0}
    manifest = {**store_manifest((), 64), "last": "none"}
    longest = spans_of(read_answers(out)[0][0], 1000)[1][0] + 1  # cuts the second answer of the first conversation
    with pytest.MonkeyPatch.context() as patch:  # no engine starts where no state is asked for
        patch.setattr(engine, "spec", lambda _: type("Spec", (), {"hidden_size": 64, "num_layers": 2}))
        engine.capture(target_dir=tmp_path, target_cfg=TargetConfig(), max_length=longest, manifest=manifest, **settings)
    store = Store(tmp_path / "store")
    for i, answer in enumerate(read_answers(out)[0]):
        ids, mask = store.tokens(i)
        assert (ids.tolist(), mask.tolist()) == masks.cut(answer, longest)
    assert store.manifest["supervised_tokens"] == sum(sum(masks.cut(a, longest)[1]) for a in read_answers(out)[0])
    assert torch.equal(torch.tensor(store.first_labels), torch.tensor([len(a["prompt_ids"]) for a in read_answers(out)[0]]))


def sampled(folder: Path, names: str, samples: int = 1, limit: int | None = None) -> list[str]:
    """Has `names` answered in the file, as `respond` does, with words for an engine. Returns what was sampled."""
    out, todo = folder / "train.jsonl", []

    def sample(items: list[dict], path: Path) -> dict:
        with path.open("a") as f:
            for item in items:
                todo.append(item["id"])
                f.write(json.dumps({**item, "response_ids": [7, 8], "finish_reason": "stop"}) + "\n")
        return {"seconds": 1.0, "generated_tokens": 2 * len(items)}

    records = [{"id": name, "prompt_ids": [ord(name)]} for name in names]
    target = TargetConfig(model="tiny", max_model_len=100)
    collect(Request(folder, target, records, out, {"samples": samples}, 4, 0, {}, {"limit": limit}), sample)
    return todo


def test_answers_stay_and_those_that_are_asked_for_now_count(tmp_path, capsys):
    """Fewer, more, others, more of each, and the first again: only what is missing is sampled, and never the sum of all is taken."""
    turns = [("abcd", 1, "abcd"), ("ab", 1, ""), ("abcde", 1, "e"), ("xy", 1, "xy"), ("ab", 2, "ab"), ("abcd", 1, "")]
    there: set[str] = set()
    for names, samples, new in turns:
        assert [name[0] for name in sampled(tmp_path, names, samples)] == list(new)
        wanted = {f"{name}#{s}" for name in names for s in range(samples)}
        there |= wanted
        chosen, others = asked_answers(tmp_path / "train.jsonl")
        assert {answer["id"] for answer in chosen} == wanted and others == len(there) - len(wanted)
        said = capsys.readouterr().out
        assert f"{len(new)} answers to sample, {len(wanted) - len(new)} already in" in said
        assert (f", and {others} to other prompts, which stay" in said) == bool(others)
        assert f"respond: {len(wanted)} answers, " in said
    assert not unfinished(tmp_path / "train.jsonl").exists()


def capture_tokens(folder: Path) -> Store:
    settings = {"responses": folder / "train.jsonl", "store_dir": folder / "store", "taps": (), "last": "none", "cap_gb": 1.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "spec", lambda _: type("Spec", (), {"hidden_size": 64, "num_layers": 2}))
        manifest = {**store_manifest((), 64), "last": "none"}
        engine.capture(target_dir=folder, target_cfg=TargetConfig(), max_length=99, manifest=manifest, **settings)
    return Store(folder / "store")


def test_a_store_holds_what_is_asked_for_and_refuses_to_be_more(tmp_path, capsys):
    sampled(tmp_path, "abcd")
    sampled(tmp_path, "ab")
    assert capture_tokens(tmp_path).ids == ["a#0", "b#0"]
    assert "2 answers in" in (said := capsys.readouterr().out) and "that this conf does not name; they stay" in said
    sampled(tmp_path, "abc")
    assert capture_tokens(tmp_path).ids == ["a#0", "b#0", "c#0"]
    sampled(tmp_path, "ab")
    refused(lambda: capture_tokens(tmp_path), "1 sequences in it, c#0 the first", "data.store")


def test_what_is_refused_leaves_the_list_of_bad_prompts_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(ask_module, "respond", lambda _: None)
    monkeypatch.setattr(ask_module, "identity", lambda *_: {"target": {}})
    prompts = [chat("a", "Hi"), chat("b", "Why?", split="heldout")]
    cfg = Cfg(DataConfig(responses=str(tmp_path)))
    ask_module.ask(cfg, tmp_path, tokenizer_for(CHATML), prompts, [{"line": 1}])
    kept = (tmp_path / "quarantine.jsonl").read_text()
    assert json.loads(kept) == {"line": 1}
    refused(lambda: ask_module.ask(cfg, tmp_path, tokenizer_for(CHATML), prompts[:1], []), "no prompt for the split 'heldout'")
    cfg.data.sampling.temperature = 0.1
    refused(lambda: ask_module.ask(cfg, tmp_path, tokenizer_for(CHATML), prompts, []), "other settings")
    assert (tmp_path / "quarantine.jsonl").read_text() == kept


@dataclass
class Cfg:
    data: DataConfig
    target: TargetConfig = field(default_factory=TargetConfig)


@pytest.mark.parametrize("answers", ["target", "given"])
def test_held_out_answers_are_always_the_targets_own(answers, tmp_path, monkeypatch):
    called: dict[str, Request] = {}
    monkeypatch.setattr(ask_module, "respond", lambda request: called.update({request.out_path.stem: request}))
    monkeypatch.setattr(ask_module, "identity", lambda *_: {"target": {}})
    prompts = [chat("a", *THREE), chat("b", "blue", "blue light", split="heldout"), chat("c", "sky", "blue", split="heldout")]
    cfg = Cfg(DataConfig(responses=str(tmp_path), answers=answers, limit=5, heldout_limit=1))
    cfg.data.sampling.samples = 3
    ask_module.ask(cfg, tmp_path, tokenizer_for(CHATML), prompts, [])
    assert set(called) == {"train", "heldout"} - ({"train"} if answers == "given" else set())
    assert [r["id"] for r in called["heldout"].records] == ["b"] and called["heldout"].sampling["samples"] == 1
    assert (tmp_path / "train.jsonl").is_file() == (answers == "given")
    if answers == "target":
        assert called["train"].sampling["samples"] == 3 and called["train"].records[0]["prompt_ids"]
    refused(lambda: ask_module.ask(cfg, tmp_path, tokenizer_for(CHATML), prompts[:1], []), "no prompt for the split 'heldout'")
