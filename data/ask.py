"""From prompts to a folder of answers: who is asked what, and who answers: the target here or on a server, or the data set itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.answers import Request, check_meta, runs, set_aside, write_asked
from data.chat import all_prompt_ids, offpolicy
from data.engine import respond
from data.errors import UserError
from data.identity import asks, identity, unfinished
from data.lock import alone, turn
from data.manifest import replace_text
from data.part import WHOLE, Part
from data.progress import Progress
from data.prompts import need, select, write_jsonl_line
from data.record import ChatRecord

if TYPE_CHECKING:
    from train.config import RunConfig


def ask(  # noqa: PLR0913
    cfg: RunConfig, target_dir: Path, tokenizer: Any, prompts: list[ChatRecord], left_out: list[dict[str, Any]], part: Part = WHOLE
) -> None:
    """Makes data.responses/train.jsonl and heldout.jsonl, or goes on with them; of several engines this one is `part`. Held-out answers are
    always the target's own: on a text of another hand acceptance reads far too high. left_out: what data.prompts.read_prompts left out, for
    quarantine.jsonl. UserError: a split without a prompt, and what `respond` and `take_given` refuse."""
    folder, maker, sampling = Path(cfg.data.responses), identity(target_dir, cfg.target), asdict(cfg.data.sampling)
    samples, loops = sampling.pop("samples"), cfg.data.loop_ngram if cfg.data.cut_loops else 0
    asked = {split: select(prompts, split, limit) for split, limit in (("train", cfg.data.limit), ("heldout", cfg.data.heldout_limit))}
    settings = {"target_dir": target_dir, "target_cfg": cfg.target, "batch_size": cfg.data.batch_size, "cut_loops": loops, "part": part}
    metas = dict.fromkeys(asked, {**maker, "sampling": sampling, "cut_loops": loops})
    if cfg.data.answers == "given":
        metas["train"] = {**maker, "answers": "given"}
    for split in asked:  # both before either is sampled, which may take hours
        need(prompts, split)
    with alone(folder, "data.responses", part):
        with turn(folder):
            for split in asked:  # and before anything there is replaced
                check_meta(folder / f"{split}.jsonl", metas[split])
        if part.number == 0:
            _quarantine(folder / "quarantine.jsonl", left_out)
        for split, each in (("train", samples), ("heldout", 1)):
            out, kept = folder / f"{split}.jsonl", {"meta": metas[split], "asks": asks(cfg.data, split)}
            if split == "train" and cfg.data.answers == "given":
                if part.number == 0:  # no engine runs for these
                    take_given(tokenizer, asked[split], out, **kept)
                continue
            encoded = all_prompt_ids(tokenizer, asked[split])
            records = [{**asdict(r), "prompt_ids": encoded[r.id], "seed": 0} for r in asked[split] if r.id in encoded]
            answer = partial(_remote(), url=cfg.data.server, tokenizer=tokenizer) if cfg.data.server else respond
            answer(Request(records=records, out_path=out, sampling={**sampling, "samples": each}, **settings, **kept))


def _quarantine(path: Path, left_out: list[dict[str, Any]]) -> None:
    """Replaces the list of prompt records that cannot be used; empty when all is well."""
    replace_text(path, "".join(json.dumps(row) + "\n" for row in left_out))
    if left_out:
        print(f"respond: the prompt records that were left out: {path}", flush=True)


def _remote() -> Callable[..., Any]:
    from data import remote  # imports openai, which takes its time

    return remote.respond


def take_given(tokenizer: Any, records: list[ChatRecord], out_path: Path, meta: dict[str, Any], asks: dict[str, Any]) -> None:
    """Writes the conversations as answers `<id>#0`, all of them or no file: every assistant turn is supervised as data.chat.offpolicy
    finds it, and what follows the last is left out. Those without such a turn are listed beside them. UserError: none has one."""
    check_meta(out_path, meta)
    written, bad, temporary = [], [], out_path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as f, Progress("respond", len(records), "conversations") as progress:
        for n, record in enumerate(records, 1):
            try:
                ids, mask = offpolicy(tokenizer, record)
            except UserError as why:
                bad.append({"id": record.id, "reason": str(why)})
                continue
            spans = runs(mask)
            start, end = spans[0][0], spans[-1][1]
            written.append(f"{record.id}#0")
            line = {"id": written[-1], "messages": record.messages, "meta": record.meta, "prompt_ids": ids[:start]}
            write_jsonl_line(f, {**line, "response_ids": ids[start:end], "spans": spans, "finish_reason": "given"})
            progress.update(n, f"{len(bad)} left out")
    if not written:
        raise UserError(f"data.answers=given: none of {len(records)} conversations can be used; the first, {bad[0]['reason']}")
    quarantine = set_aside(out_path, bad, anew=True)
    if bad:
        print(f"respond: {len(bad)} of {len(records)} conversations left out: {quarantine}; the first, {bad[0]['reason']}", flush=True)
    unfinished(out_path).touch()
    write_asked(out_path, asks, written)
    temporary.replace(out_path)
    unfinished(out_path).unlink()
    print(f"respond: {len(written)} conversations with given answers -> {out_path}", flush=True)
