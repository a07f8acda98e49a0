"""Prompts that the target writes itself: it is given its chat template up to where a user would begin, and goes on (Magpie, arXiv
2406.08464). For when there are too few prompts of one's own: what a head learns from is then still the target's own text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.chat import user_prefix
from data.engine import read_answers, respond
from data.errors import UserError
from data.identity import identity
from data.prompts import ChatRecord, write_jsonl_line

if TYPE_CHECKING:
    from train.config import RunConfig

LONGEST = 256  # tokens of a prompt that the target writes; a longer one is left out
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "max_tokens": LONGEST, "samples": 1, "greedy": False}
LEAST = 8  # characters of a prompt


def invent(cfg: RunConfig, target_dir: Path, tokenizer: Any, count: int, out: Path) -> list[ChatRecord]:
    """Has the target write `count` prompts; those that end by themselves, each once, become `out`, a JSONL source for data.prompts.

    Resumes: what was sampled stays beside `out`. UserError: the template puts nothing before a user's words, or nothing usable came.
    """
    prefix = user_prefix(tokenizer)
    drafts = out.with_name(out.stem + ".drafts.jsonl")
    records = [{"id": f"self-{i:06d}", "messages": [], "meta": {}, "prompt_ids": prefix, "seed": 1} for i in range(count)]
    maker = {**identity(target_dir, cfg.target), "sampling": {k: v for k, v in SAMPLING.items() if k != "samples"}, "cut_loops": 0}
    respond(
        target_dir=target_dir,
        target_cfg=cfg.target,
        records=records,
        out_path=drafts,
        sampling=SAMPLING,
        max_model_len=cfg.target.max_model_len,
        batch_size=cfg.data.batch_size,
        cut_loops=0,
        meta=maker,
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
    return found


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
