"""What `launch/masks.py` says: statistics that can be counted by hand, and colours exactly on the generated tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data import masks
from data.builtin import build_tiny
from data.chat import load_tokenizer
from data.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
ANSWERS = [
    {"id": "a#0", "meta": {"category": "chat"}, "prompt_ids": [5, 6, 7], "response_ids": [8, 9], "finish_reason": "stop"},
    {"id": "b#0", "meta": {"category": "code"}, "prompt_ids": [5], "response_ids": [8, 9, 10, 11, 12], "finish_reason": "length"},
    {"id": "c#0", "meta": {"category": "code"}, "prompt_ids": [5, 6], "response_ids": [8, 9], "finish_reason": "loop"},
]


def test_statistics_by_slice():
    found = masks.statistics(ANSWERS, max_length=5)
    assert list(found) == ["chat", "code", "all"]
    assert found["chat"].pop("ended") == {"stop": 1, "length": 0, "loop": 0, "given": 0}
    assert found["chat"] == {"records": 1, "tokens": 5, "supervised": 2 / 5, "cut": 0}
    assert found["code"]["supervised"] == 6 / 9 and found["code"]["cut"] == 1 and found["code"]["ended"]["loop"] == 0.5
    assert found["all"]["records"] == 3 and found["all"]["tokens"] == pytest.approx(14 / 3)


def test_colour_marks_the_generated_tokens_and_nothing_else(tmp_path):
    tokenizer = load_tokenizer(build_tiny(tmp_path / "target"), False)
    prompt, response = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Why is it?", "Because of the sky."))
    text = masks.coloured(tokenizer, *masks.cut({"prompt_ids": prompt, "response_ids": response}, 100))
    green = "".join(text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style))
    assert green == tokenizer.decode(response) and text.plain == tokenizer.decode(prompt) + tokenizer.decode(response)


def test_no_answers_yet_says_how_to_make_them(tmp_path):
    with pytest.raises(UserError, match="launch/respond.py"):
        masks.show(tmp_path / "train.jsonl", None, 5, 1)  # type: ignore[arg-type]


def test_the_command(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in ANSWERS))
    command = [sys.executable, ROOT / "launch/masks.py", "conf=tiny_mtp", f"data.responses={tmp_path}", "show=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "", "HOME": str(tmp_path), "COLUMNS": "140"})
    assert done.returncode == 0, done.stderr
    assert "code" in done.stdout and "a#0" in done.stdout and "b#0" in done.stdout
