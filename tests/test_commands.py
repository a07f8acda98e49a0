"""Commands in messages: what was typed, so that they can be pasted; and what --help says of each script."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data.commands import command, remember
from train.config import ROOT, RunConfig
from train.usage import keys, usage

SOURCES = sorted(path for folder in ("data", "train", "eval", "launch") for path in (ROOT / folder).rglob("*.py"))
SCRIPTS = sorted(path.stem for path in (ROOT / "launch").glob("*.py"))
# where none was given, or what one is
NO_CONF = {"data/commands.py", "train/words.py", "train/usage.py", "eval/sweep.py", "launch/sweep.py"}


def test_a_command_has_the_words_that_were_given_but_those_of_one_call(monkeypatch, tmp_path):
    assert command("train") == "python launch/train.py conf=<name>"
    monkeypatch.chdir(ROOT / "launch")
    remember(["conf=tiny_mtp", "data.prompts=[a b.jsonl]", "dry_run=true", "head.loss=0.1*ce+0.9*tv"])
    monkeypatch.chdir(tmp_path)  # as the engine's process does
    words = "conf=tiny_mtp 'data.prompts=[a b.jsonl]' 'head.loss=0.1*ce+0.9*tv'"
    assert command("capture") == f"python ./capture.py {words}"
    assert (
        command("train", "data.prompts=[c]", "name=x")
        == "python ./train.py conf=tiny_mtp 'head.loss=0.1*ce+0.9*tv' 'data.prompts=[c]' name=x"
    )


def texts(path: Path) -> list[str]:
    """The strings of a file that are no docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    about = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in about]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_message_writes_a_command_of_its_own(path):
    name = str(path.relative_to(ROOT))
    found = [text for text in texts(path) if "conf=<name>" in text or re.search(r"launch/\w+\.py", text)]
    assert not found or name in NO_CONF, f"{name}: {found}; use data.commands.command"


def test_every_key_has_its_line():
    found = dict(keys(RunConfig))
    assert all(comment for comment in found.values()), [key for key, comment in found.items() if not comment]
    assert found["optim.betas=[0.9,0.95]"] == "AdamW" and "data.limit=null" in found and "head.<key>=" in found
    assert "data.sampling.greedy=false" in found and "name=" in found


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_what_a_script_is_for_its_own_words_and_its_keys(name):
    source = (ROOT / "launch" / f"{name}.py").read_text()
    tree = ast.parse(source)
    about = ast.get_docstring(tree)
    assert about and f"launch/{name}.py conf=<name>" in about
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    words = {name: [ast.literal_eval(arg) for call in calls if ast.unparse(call.func) == name for arg in call.args
                    if isinstance(arg, ast.Constant)] for name in ("take", "main")}  # fmt: skip
    own = words["take"] + ["check"] * ('"check=true"' in source)
    assert all(f"{word}=" in about for word in own), own
    sections = tuple(words["main"])
    assert set(sections) <= {field.name for field in dataclasses.fields(RunConfig)}
    said = usage(about, sections)
    assert said.startswith(about) and "conf: demo, " in said and "  optim: cosine, muon, wsd" in said
    for section in ("data", "train", "eval"):
        assert (f"\n  {section}." in said) == (not sections or section in sections)


def test_a_reader_that_goes_away_is_no_fault():
    """`--help | head -1`."""
    done = subprocess.Popen([sys.executable, ROOT / "launch" / "plan.py", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.stdout is not None and done.stderr is not None
    done.stdout.close()
    assert (done.stderr.read(), done.wait()) == (b"", 141)
