"""Prompts that the target writes itself, the source `self:<n>`: it is given its chat template up to where a user would begin, and goes on
(Magpie, arXiv 2406.08464). For when there are too few prompts of one's own: what a head learns from is then still the target's own text.
Beside other sources each begins with the first words of a training prompt of theirs, so that it asks for things of that kind."""

from __future__ import annotations

import random
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.answers import Request, asked_answers
from data.chat import user_prefix
from data.engine import respond
from data.errors import UserError
from data.identity import identity
from data.lock import alone, turn
from data.part import WHOLE, Part
from data.prompts import need, read_prompts, select, write_jsonl_line
from data.record import UNKNOWN, ChatRecord

if TYPE_CHECKING:
    from train.config import RunConfig

LONGEST = 256  # tokens of a prompt that the target writes; a longer one is left out
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "max_tokens": LONGEST, "samples": 1, "greedy": False}
LEAST = 8  # characters of a prompt
OPENING = (0.2, 0.6)  # share of a prompt's words that another begins with: enough to ask for the same kind of thing, with room for its own
MARK = "self:"


def split_sources(sources: list[str]) -> tuple[list[str], int]:
    """The sources of data.prompts that exist, and how many prompts the target is asked to write. UserError: `self:` without a number, or
    with a weight."""
    if weighted := [source for source in sources if f"*{MARK}" in source]:
        raise UserError(f"data.prompts: {weighted[0]}: {MARK}<n> takes no weight; n says how many prompts the target is to write")
    counts = [source.removeprefix(MARK) for source in sources if source.startswith(MARK)]
    if bad := [count for count in counts if not count.isdecimal() or int(count) < 1]:
        raise UserError(f"data.prompts: {MARK}{bad[0]} must be {MARK}<n>, n the number of prompts that the target is to write, 1 or more")
    if len(counts) > 1:
        raise UserError(f"data.prompts: {MARK}<n> is there {len(counts)} times; name it once")
    return [source for source in sources if not source.startswith(MARK)], sum(map(int, counts))


def read_given(cfg: RunConfig, root: Path) -> list[ChatRecord]:
    """The records of data.prompts but for `self:<n>`: what the target wrote is for training, so these are what is measured on."""
    return read_prompts(split_sources(cfg.data.prompts)[0], root, cfg.data.prompt_chars)


def read_with_own(  # noqa: PLR0913
    cfg: RunConfig, target_dir: Path, tokenizer: Any, root: Path, left_out: list[dict[str, Any]], part: Part = WHOLE
) -> list[ChatRecord]:
    """The records of data.prompts (relative paths count from `root`), those of `self:<n>` last: of several engines one has the target write
    them, and the others wait for it. left_out: see data.prompts.read_prompts. UserError, before the engine starts: none of the others has
    held-out prompts."""
    sources, count = split_sources(cfg.data.prompts)
    folder = Path(cfg.data.responses)

    def write(given: list[ChatRecord]) -> str:
        need(given, "heldout")
        like = select(given, "train", None)
        with alone(folder, "data.responses", part), turn(folder, ".turn-self"):
            return str(invent(cfg, target_dir, tokenizer, count, folder / "self.jsonl", like))

    if count and not sources:
        raise UserError(
            f"data.prompts=[{MARK}{count}]: what the target writes is for training alone, and acceptance is measured on held-out "
            f"prompts of another hand: name a source of some beside it, as data.prompts=[data/promptset,{MARK}{count}]"
        )
    return read_prompts(sources, root, cfg.data.prompt_chars, left_out, write if count else None)


def invent(cfg: RunConfig, target_dir: Path, tokenizer: Any, count: int, out: Path, like: list[ChatRecord]) -> Path:  # noqa: PLR0913
    """Has the target write `count` prompts; those that end by themselves, each once, become `out`, a JSONL source for data.prompts.
    Each begins as one of `like` does, in turn, and is of its category.

    Resumes: what was sampled stays beside `out`. UserError: the template puts nothing before a user's words, or nothing usable came.
    """
    prefix = user_prefix(tokenizer)
    drafts = out.with_name(out.stem + ".drafts.jsonl")
    records = [beginning(tokenizer, prefix, i, like[i % len(like)] if like else None) for i in range(count)]
    settings = {"target_dir": target_dir, "target_cfg": cfg.target, "batch_size": cfg.data.batch_size, "cut_loops": 0}
    settings |= {"meta": maker(cfg, target_dir), "asks": {"prompts": f"{MARK}{count}"}}
    respond(Request(records=records, out_path=drafts, sampling=SAMPLING, **settings))
    found = usable(asked_answers(drafts)[0], tokenizer, len(prefix))
    if not found:
        raise UserError(f"{drafts}: none of {count} prompts that the target wrote can be used; is it a chat model?")
    temporary = out.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as f:
        for record in found:
            write_jsonl_line(f, {key: value for key, value in asdict(record).items() if value is not None})
    temporary.replace(out)
    print(f"{out}: {len(found)} prompts of {count}; the others had no end, no words, or were there before", flush=True)
    return out


def beginning(tokenizer: Any, prefix: list[int], i: int, like: ChatRecord | None) -> dict[str, Any]:
    """What the engine is given for the prompt of number i: `prefix`, and the first words of what `like` asks first."""
    meta = {"category": "self", "language": UNKNOWN}
    ids = list(prefix)
    if like is not None:
        meta |= {key: like.meta[key] for key in meta if key in like.meta}
        ids += tokenizer(opening(like, random.Random(i)), add_special_tokens=False)["input_ids"]
    return {"id": f"self-{i:06d}", "messages": [], "meta": meta, "prompt_ids": ids, "seed": 1}


def opening(record: ChatRecord, rng: random.Random) -> str:
    """The first words, as large a share as `rng` says, of the first user's turn. It depends on no other record, so a run may be resumed."""
    text = next(message["content"] for message in record.messages if message["role"] == "user").strip()
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    return text[: ends[max(1, int(len(ends) * rng.uniform(*OPENING))) - 1]]


def maker(cfg: RunConfig, target_dir: Path) -> dict[str, Any]:
    """What wrote the prompts: they are not mixed with those of another target or other settings."""
    return {**identity(target_dir, cfg.target), "sampling": {k: v for k, v in SAMPLING.items() if k != "samples"}, "cut_loops": 0}


def usable(answers: list[dict[str, Any]], tokenizer: Any, skip: int) -> list[ChatRecord]:
    """Those that ended with the template's own end of turn and say something that none before them said, in the order of their ids.

    skip: tokens of the template before the user's words.
    """
    found, seen = [], set()
    for answer in sorted(answers, key=lambda a: a["id"]):
        text = tokenizer.decode(answer["prompt_ids"][skip:] + answer["response_ids"], skip_special_tokens=True).strip()
        if answer["finish_reason"] == "stop" and len(text) >= LEAST and text.casefold() not in seen:
            seen.add(text.casefold())
            meta = {**answer["meta"], "split": "train"}
            found.append(ChatRecord(answer["id"].partition("#")[0], [{"role": "user", "content": text}], meta))
    return found
