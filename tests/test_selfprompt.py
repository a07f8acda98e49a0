"""Prompts that the target writes: where it is made to begin, what of it is used, and the run in the engine."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import refused

from data import selfprompt
from data.builtin import build_tiny
from data.chat import load_tokenizer, user_prefix
from data.errors import UserError
from data.prompts import read_prompts, select
from data.record import ChatRecord
from data.selfprompt import OPENING, beginning, invent, maker, opening, split_sources, usable
from train import plan
from train.config import load

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(build_tiny(tmp_path_factory.mktemp("self") / "target"), False)


def test_the_target_goes_on_where_a_user_would_begin(tokenizer):
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}], tokenize=False)
    before = whole.partition("Why?")[0]
    assert before and user_prefix(tokenizer) == tokenizer(before, add_special_tokens=False)["input_ids"]


def test_a_template_that_puts_nothing_there_is_refused(tokenizer):
    kept = tokenizer.chat_template
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    try:
        with pytest.raises(UserError, match="nothing before a user's words"):
            user_prefix(tokenizer)
    finally:
        tokenizer.chat_template = kept


def test_what_has_no_end_or_no_words_or_was_there_before_is_left_out(tokenizer):
    def answer(name, text, reason="stop", begins=""):
        ids = {"prompt_ids": [1, *tokenizer(begins)["input_ids"]], "response_ids": tokenizer(text)["input_ids"]}
        return {"id": f"{name}#0", "meta": {"category": "chat"}, **ids, "finish_reason": reason}

    answers = [
        answer("d", " is a lighthouse?", begins="What"),
        answer("a", "Write a poem about tea."),
        answer("b", "write a poem about tea. "),
    ]
    answers += [answer("c", "What is the endless", "length"), answer("e", "Hm?")]
    found = usable(answers, tokenizer, 1)
    assert [(record.id, record.messages[0]["content"]) for record in found] == [
        ("a", "Write a poem about tea."),
        ("d", "What is a lighthouse?"),
    ]
    assert all(record.meta == {"category": "chat", "split": "train"} for record in found)


@pytest.mark.parametrize(
    "text", ["Why?", "Why so?", "  One two\nthree  four five six seven eight nine ten", "Gökyüzü neden\u2028mavi görünür?"]
)
def test_an_opening_is_whole_words_of_the_first_turn_and_leaves_some(text):
    record = ChatRecord("a", [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}], {})
    words, shares = text.split(), set()
    for seed in range(40):
        found = opening(record, random.Random(seed))
        assert found == opening(record, random.Random(seed)) and text.strip().startswith(found)
        count = len(found.split())
        assert found.split() == words[:count] and (count < len(words) or len(words) == 1)
        shares.add(count / len(words))
    assert len(words) < 4 or len(shares) > 1
    assert len(words) < 8 or OPENING[0] - 1 / len(words) < min(shares) < max(shares) <= OPENING[1]


def test_a_prompt_begins_as_another_does_and_is_of_its_kind(tokenizer):
    like = ChatRecord("x", [{"role": "user", "content": "Translate this into French: The sea is calm."}], {"category": "translation"})
    prefix = user_prefix(tokenizer)
    made = beginning(tokenizer, prefix, 7, like)
    said = tokenizer.decode(made["prompt_ids"][len(prefix) :])
    assert made["prompt_ids"][: len(prefix)] == prefix and said == opening(like, random.Random(7))
    assert made["meta"] == {"category": "translation", "language": "und"}
    assert beginning(tokenizer, prefix, 7, None)["prompt_ids"] == prefix


def test_the_engine_writes_them_and_a_second_call_goes_on(tmp_path):
    """The tiny target's random weights seldom end a turn: what comes of it is a file, or a sentence that says why not."""
    target = build_tiny(tmp_path / "target")
    cfg = load(["conf=tiny_mtp", f"target.model={target}"])
    out = tmp_path / "prompts.jsonl"
    for count in (3, 5):
        try:
            invent(cfg, target, load_tokenizer(target, False), count, out, [])
        except UserError as error:
            assert f"none of {count} prompts" in str(error)
        drafts = [json.loads(line) for line in (tmp_path / "prompts.drafts.jsonl").read_text().splitlines()]
        assert sorted(draft["id"] for draft in drafts) == [f"self-{i:06d}#0" for i in range(count)]
        assert all(draft["prompt_ids"] == user_prefix(load_tokenizer(target, False)) for draft in drafts)


@pytest.mark.parametrize(
    "sources", [["self:"], ["a.jsonl", "self:x"], ["self:0"], ["self:-3"], ["self:2", "self:3"], ["a.jsonl", "2*self:3"]]
)
def test_how_many_must_be_said_once(sources):
    with pytest.raises(UserError, match=r"data.prompts: .*self:"):
        split_sources(sources)


@pytest.mark.parametrize("prompts", ["[self:4]", "[{train},self:4]"])
def test_without_held_out_prompts_of_another_hand_the_engine_is_not_started(prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(selfprompt, "invent", lambda *_: pytest.fail("the engine was started"))
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps({"messages": [{"role": "user", "content": "Why?"}], "meta": {"split": "train"}}) + "\n")
    cfg = load(["conf=tiny_mtp", f"data.prompts={prompts.format(train=train)}", f"data.responses={tmp_path}"])
    refused(
        lambda: selfprompt.read_with_own(cfg, tmp_path, None, ROOT, []),
        "data.prompts",
        "'heldout'" if "{train}" in prompts else "[data/promptset,self:4]",
    )


def test_the_command_adds_them_to_the_training_prompts_alone(tmp_path):
    """respond with `self:<n>`, the engine's prompts being given: they are answered for training, and the held-out ones are as before."""
    target = build_tiny(tmp_path / "target")
    tokenizer = load_tokenizer(target, False)
    folder = tmp_path / "responses"
    drafts = folder / "self.drafts.jsonl"
    given = tmp_path / "given.jsonl"
    given.write_text("".join((ROOT / f"data/promptset/{name}.jsonl").read_text() for name in ("chat", "code")))
    words = ["conf=tiny_mtp", f"target.model={target}", f"data.prompts=[{given},self:4]", f"data.responses={folder}"]
    words += ["data.limit=null", "data.heldout_limit=2", "data.sampling.max_tokens=4"]
    cfg = load(words)
    folder.mkdir()
    texts = ["What is a lighthouse?", "Write a poem about tea.", "Name three rivers.", "Sing a song of stone."]
    like = select(read_prompts([str(given)], ROOT), "train", None)
    with drafts.open("w") as f:
        for i, text in enumerate(texts):
            asked = beginning(tokenizer, user_prefix(tokenizer), i, like[i])
            answer = {**asked, "id": f"{asked['id']}#0", "response_ids": tokenizer(text)["input_ids"], "finish_reason": "stop"}
            f.write(json.dumps(answer) + "\n")
    drafts.with_suffix(".meta.json").write_text(json.dumps(maker(cfg, target)))
    done = subprocess.run([sys.executable, ROOT / "launch/respond.py", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 answers to sample, 4 already in" in done.stdout
    asked = {
        split: [json.loads(line)["id"] for line in (folder / f"{split}.jsonl").read_text().splitlines()] for split in ("train", "heldout")
    }
    assert {i for i in asked["train"] if i.startswith("self-")} and not any(i.startswith("self-") for i in asked["heldout"])
    assert plan.count_prompts(cfg, "train") == len(asked["train"]) == 160 + 4
