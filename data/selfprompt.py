"""Prompts that the target writes itself, the source `self:<n>`: it is given its chat template up to where a user would begin, and goes on
(Magpie, arXiv 2406.08464). For when there are too few prompts of one's own: what a head learns from is then still the target's own text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.answers import read_answers
from data.chat import user_prefix
from data.engine import respond
from data.errors import UserError
from data.identity import identity
from data.lock import alone
from data.prompts import write_jsonl_line
from data.record import ChatRecord

if TYPE_CHECKING:
    from train.config import RunConfig

LONGEST = 256  # tokens of a prompt that the target writes; a longer one is left out
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "max_tokens": LONGEST, "samples": 1, "greedy": False}
LEAST = 8  # characters of a prompt
MARK = "self:"


def split_sources(sources: list[str]) -> tuple[list[str], int]:
    """The sources of data.prompts that exist, and how many prompts the target is asked to write. UserError: `self:` without a number."""
    counts = [source.removeprefix(MARK) for source in sources if source.startswith(MARK)]
    if bad := [count for count in counts if not count.isdecimal() or int(count) < 1]:
        raise UserError(f"data.prompts: {MARK}{bad[0]} must be {MARK}<n>, n the number of prompts that the target is to write, 1 or more")
    if len(counts) > 1:
        raise UserError(f"data.prompts: {MARK}<n> is there {len(counts)} times; name it once")
    return [source for source in sources if not source.startswith(MARK)], sum(map(int, counts))


def with_own(cfg: RunConfig, target_dir: Path, tokenizer: Any) -> list[str]:
    """The sources of data.prompts, with the file of the target's own prompts, written first, in place of `self:<n>`."""
    sources, count = split_sources(cfg.data.prompts)
    folder = Path(cfg.data.responses)
    if count:
        with alone(folder, "data.responses"):
            sources.append(str(invent(cfg, target_dir, tokenizer, count, folder / "self.jsonl")))
    return sources


def invent(cfg: RunConfig, target_dir: Path, tokenizer: Any, count: int, out: Path) -> Path:
    """Has the target write `count` prompts; those that end by themselves, each once, become `out`, a JSONL source for data.prompts.

    Resumes: what was sampled stays beside `out`. UserError: the template puts nothing before a user's words, or nothing usable came.
    """
    prefix = user_prefix(tokenizer)
    drafts = out.with_name(out.stem + ".drafts.jsonl")
    records = [{"id": f"self-{i:06d}", "messages": [], "meta": {}, "prompt_ids": prefix, "seed": 1} for i in range(count)]
    respond(
        target_dir=target_dir,
        target_cfg=cfg.target,
        records=records,
        out_path=drafts,
        sampling=SAMPLING,
        batch_size=cfg.data.batch_size,
        cut_loops=0,
        meta=maker(cfg, target_dir),
    )
    found = usable(read_answers(drafts)[0], tokenizer)
    if not found:
        raise UserError(f"{drafts}: none of {count} prompts that the target wrote can be used; is it a chat model?")
    temporary = out.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as f:
        for record in found:
            write_jsonl_line(f, {key: value for key, value in asdict(record).items() if value is not None})
    temporary.replace(out)
    print(f"{out}: {len(found)} prompts of {count}; the others had no end, no words, or were there before", flush=True)
    return out


def maker(cfg: RunConfig, target_dir: Path) -> dict[str, Any]:
    """What wrote the prompts: they are not mixed with those of another target or other settings."""
    return {**identity(target_dir, cfg.target), "sampling": {k: v for k, v in SAMPLING.items() if k != "samples"}, "cut_loops": 0}


def usable(answers: list[dict[str, Any]], tokenizer: Any) -> list[ChatRecord]:
    """Those that ended with the template's own end of turn and say something that none before them said, in the order of their ids."""
    found, seen = [], set()
    for answer in sorted(answers, key=lambda a: a["id"]):
        text = tokenizer.decode(answer["response_ids"], skip_special_tokens=True).strip()
        if answer["finish_reason"] == "stop" and len(text) >= LEAST and text.casefold() not in seen:
            seen.add(text.casefold())
            meta = {"category": "self", "language": "und", "split": "train"}
            found.append(ChatRecord(answer["id"].partition("#")[0], [{"role": "user", "content": text}], meta))
    return found
