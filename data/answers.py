"""The files of answers, one JSON line each: `<split>.jsonl` with `<split>.meta.json`, which says what wrote them, and `<split>.asked.json`,
which says what was asked for last; and what they supervise. A folder may hold more than that: answers are dear, so they stay.

A record: id (`<prompt>#<sample>`), messages, meta, prompt_ids, response_ids, finish_reason ("stop", "length", "loop" or "given"), perhaps
sampling. Supervised is the response; of a given answer, whose later user turns are in the response too, its `spans` alone.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from data.identity import read_asked, read_meta, unfinished
from data.lock import at_work, held, turn
from data.manifest import replace_text
from data.part import WHOLE, Part, part_files
from data.prompts import jsonl_line, read_jsonl_tolerant, write_jsonl_line

if TYPE_CHECKING:
    from train.config import TargetConfig

Spans = list[list[int]]  # [start, end) each, ascending


@dataclass(frozen=True)
class Request:
    """What the target is asked, and where its answers go. records: {id, messages, meta, prompt_ids, seed}; sampling: of SamplingConfig;
    batch_size: at once; cut_loops n > 0: an answer is ended where an n-gram begins for the second time (finish_reason "loop"); meta: kept
    beside the file; asks: see `write_asked`; part: of the records that this engine answers."""

    target_dir: Path
    target_cfg: TargetConfig
    records: list[dict[str, Any]]
    out_path: Path
    sampling: dict[str, Any]
    batch_size: int
    cut_loops: int
    meta: dict[str, Any]
    asks: dict[str, Any]
    part: Part = WHOLE


def collect(request: Request, sample: Callable[[list[dict[str, Any]], Path], dict[str, Any]]) -> dict[str, Any]:
    """Has `sample` append to a file the answers `<id>#<s>` that there are not yet, s < sampling["samples"]; it returns seconds and
    generated_tokens. The file is request.out_path, or one beside it of this part, which the last of the parts to end joins.

    Records whose prompt leaves no room for an answer are listed beside the answers. UserError where the file was made with another meta, or
    answers other prompts. Returns answers, tokens and finish shares of what was asked for, and tokens_per_second of this run.
    """
    out, own = request.out_path, request.part.beside(request.out_path)
    out.parent.mkdir(parents=True, exist_ok=True)
    with turn(out.parent):
        check_meta(out, request.meta)
        done = _finished(own)
        for path in {out, *part_files(out)} - {own}:
            done |= _prompts(read_answers(path)[0]) if path.exists() else {}
    mine, long = request.part.of(request.records), _too_long(request)
    _say_long([r for r in mine if r["id"] in long], len(mine), request.target_cfg.max_model_len - 1, own)
    todo = unanswered([r for r in mine if r["id"] not in long], request.sampling["samples"], done, out)
    wanted = [name for record, name in names_of(request) if record not in long]
    there = sum(name in done for name in wanted)
    others = f", and {len(done) - there} to other prompts, which stay" if len(done) > there else ""
    print(f"respond: {len(todo)} answers to sample, {there} already in {out}{others}", flush=True)
    ran = {"seconds": 0.0, "generated_tokens": 0}
    with at_work(own) if todo else nullcontext():
        with turn(out.parent):
            if todo or (own != out and there < len(wanted)):
                unfinished(out).touch()
            write_asked(out, request.asks, wanted)
        if todo:
            ran = sample(todo, own)
    if not join(request):
        print(f"respond: {request.part.name} has nothing more to do; the last of the {request.part.count} writes {out}", flush=True)
        return _summary(read_answers(own)[0] if own.exists() else [], ran)
    return _summary(asked_answers(out)[0] if out.exists() else [], ran)


def write_asked(out_path: Path, asks: dict[str, Any], ids: list[str]) -> None:
    """Keeps beside the answers what was asked for: `asks`, the settings that decide it, and the ids of the answers. While these are not
    all there, `unfinished` says so."""
    replace_text(out_path.with_suffix(".asked.json"), json.dumps({"asks": asks, "ids": ids}, ensure_ascii=False) + "\n")


def asked_answers(path: Path) -> tuple[list[dict[str, Any]], int]:
    """As read_answers, those alone that were asked for last (all, where nothing says what was), and how many others there are."""
    answers, _ = read_answers(path)
    if (told := read_asked(path)) is None:
        return answers, 0
    wanted = set(told["ids"])
    chosen = [answer for answer in answers if answer["id"] in wanted]
    return chosen, len(answers) - len(chosen)


def say_others(others: int, path: Path) -> None:
    if others:
        print(f"capture: {others} answers in {path} are to prompts that this conf does not name; they stay there", flush=True)


def names_of(request: Request) -> list[tuple[str, str]]:
    """(record, answer) of all answers wanted, by their ids."""
    return [(r["id"], f"{r['id']}#{s}") for r in request.records for s in range(request.sampling["samples"])]


def _too_long(request: Request) -> set[str]:
    """The records whose prompt leaves no room for an answer."""
    return {r["id"] for r in request.records if len(r["prompt_ids"]) >= request.target_cfg.max_model_len}


def join(request: Request) -> bool:
    """Whether all that is asked is answered or set aside by one of as many parts: then request.out_path holds the answers of all parts,
    in the order of the records, and their files are deleted, but for those that still grow. An engine ends answers in another
    order after each kill; store and batches follow the file. A kill at any moment leaves what the next call can go on from: the mark goes
    once the answers are there, the files after it."""
    out, part = request.out_path, request.part
    listed, several = out.with_suffix(".quarantine.jsonl"), part.count > 1
    with turn(out.parent):
        files, lists = part_files(out), part_files(listed)
        if files or unfinished(out).exists():
            answers: dict[str, Any] = {}
            for path in [out, *files]:
                answers |= {answer["id"]: answer for answer in read_answers(path)[0]} if path.exists() else {}
            aside: dict[str, Any] = {}
            for path in {Part(number, part.count).beside(listed) for number in range(part.count)} - {listed}:
                aside |= {line["id"]: line for line in read_jsonl_tolerant(path)[0]} if path.exists() else {}
            known, long, names = answers.keys() | aside.keys(), _too_long(request), names_of(request)
            if several and not all(record in long or {record, name} & known for record, name in names):
                return False
            place = {name: i for i, (_, name) in enumerate(names)}
            ordered = sorted(answers.values(), key=lambda answer: place.get(answer["id"], len(place)))
            replace_text(out, "".join(jsonl_line(answer) for answer in ordered))
            if several:  # one alone has just made its own list
                set_aside(out, [line for name, line in aside.items() if name not in answers], anew=True)
        running = [path for path in files if path != part.beside(out) and held(out.parent, path.name)]
        if not running:
            unfinished(out).unlink(missing_ok=True)
        for path in {*files} - {*running} if running else {*files, *lists}:  # whoever ends after us joins the lists again
            path.unlink(missing_ok=True)
        return True


def spans_of(answer: dict[str, Any], max_length: int) -> Spans:
    """The supervised positions of prompt_ids + response_ids, as far as max_length."""
    start, end = len(answer["prompt_ids"]), len(answer["prompt_ids"]) + len(answer["response_ids"])
    spans = answer["spans"] if "spans" in answer else [[start, end]]
    return [[a, min(b, max_length)] for a, b in spans if a < min(b, max_length)]


def cut_answers(answers: list[dict[str, Any]], max_length: int, path: Path) -> list[dict[str, Any]]:
    """{id, token_ids, spans} of each answer, cut to max_length tokens; those without a supervised token within are left out.
    UserError: none is left of those at `path`."""
    kept = []
    for answer in answers:
        if spans := spans_of(answer, max_length):
            kept.append({"id": answer["id"], "token_ids": (answer["prompt_ids"] + answer["response_ids"])[:max_length], "spans": spans})
    if not kept:
        raise UserError(f"{path}: no answer with a token within data.max_length={max_length}: raise it, or sample again")
    return kept


def mask_of(spans: Spans, length: int) -> list[bool]:
    mask = [False] * length
    for a, b in spans:
        mask[a:b] = [True] * (b - a)
    return mask


def runs(mask: list[bool]) -> Spans:
    """The spans of a mask: mask_of(runs(mask), len(mask)) == mask."""
    found = []
    for on, members in groupby(range(len(mask)), key=lambda i: mask[i]):
        if on:
            positions = list(members)
            found.append([positions[0], positions[-1] + 1])
    return found


def check_meta(out_path: Path, meta: dict[str, Any]) -> None:
    """Writes `<stem>.meta.json` beside the answers, or compares with the one that is there."""
    path = out_path.with_suffix(".meta.json")
    meta = json.loads(json.dumps(meta))
    if path.exists():
        old = read_meta(path)
        differ = [f"{k}: {old.get(k)!r} there, {meta.get(k)!r} now" for k in sorted(old.keys() | meta.keys()) if old.get(k) != meta.get(k)]
        if differ:
            raise UserError(
                f"{out_path} was sampled with other settings ({'; '.join(differ)}): delete that folder or choose another data.responses"
            )
        return
    if out_path.exists():
        raise UserError(f"{out_path} has no {path.name} beside it, which says what wrote it: delete it or choose another data.responses")
    replace_text(path, json.dumps(meta, indent=1, ensure_ascii=False) + "\n")


def read_answers(path: Path) -> tuple[list[dict[str, Any]], int]:
    """read_jsonl_tolerant of a file of answers. UserError: a record that is no answer, or an id that is there twice."""
    answers, valid_bytes = read_jsonl_tolerant(path)
    seen: set[str] = set()
    for n, answer in enumerate(answers, 1):
        missing = [key for key in ("id", "prompt_ids", "response_ids", "finish_reason") if key not in answer]
        if missing or answer["id"] in seen:
            fault = f"has no {', no '.join(missing)}" if missing else f"repeats the id {answer['id']}"
            raise UserError(f"{path}: record {n} {fault}; delete that line, or the folder to sample anew")
        seen.add(answer["id"])
    return answers, valid_bytes


def _finished(out_path: Path) -> dict[str, list[int]]:
    """Id -> prompt ids of the answers already there; a last line that a kill cut short is removed."""
    if not out_path.exists():
        return {}
    answers, valid_bytes = read_answers(out_path)
    if valid_bytes < out_path.stat().st_size:
        os.truncate(out_path, valid_bytes)
    return _prompts(answers)


def _prompts(answers: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {answer["id"]: answer["prompt_ids"] for answer in answers}


def unanswered(records: list[dict[str, Any]], samples: int, done: dict[str, list[int]], out_path: Path) -> list[dict[str, Any]]:
    """The requests `<id>#<sample>` that `done` (id -> prompt ids, in any order) lacks. UserError: one of them answers another prompt."""
    wanted = [{**r, "id": f"{r['id']}#{s}"} for r in records for s in range(samples)]
    if other := [r["id"] for r in wanted if done.get(r["id"], r["prompt_ids"]) != r["prompt_ids"]]:
        raise UserError(
            f"{out_path}: {other[0]} and {len(other) - 1} more answer other prompts than data.prompts now has under these ids: "
            "delete that folder or choose another data.responses"
        )
    return [r for r in wanted if r["id"] not in done]


def set_aside(out_path: Path, lines: list[dict[str, Any]], *, anew: bool) -> Path:
    """The list beside the answers of what has none, {id, reason} a line: `lines` are added, anew: to an empty one. No file where it is
    empty."""
    path = out_path.with_suffix(".quarantine.jsonl")
    if anew:
        path.unlink(missing_ok=True)
    if lines:
        with path.open("a", encoding="utf-8") as f:
            for line in lines:
                write_jsonl_line(f, line)
    return path


def _say_long(long: list[dict[str, Any]], count: int, most: int, out_path: Path) -> None:
    """Lists beside the answers, and counts aloud, the records of `count` whose prompt leaves no room for an answer."""
    reasons = [f"prompt of {len(r['prompt_ids'])} tokens, over target.max_model_len - 1 = {most}" for r in long]
    path = set_aside(out_path, [{"id": r["id"], "reason": reason} for r, reason in zip(long, reasons, strict=True)], anew=True)
    if long:
        print(f"respond: {len(long)} of {count} prompts are longer than {most} tokens and left out: {path}", flush=True)


def _summary(answers: list[dict[str, Any]], ran: dict[str, Any]) -> dict[str, Any]:
    reasons = Counter(answer["finish_reason"] for answer in answers)
    shares = {reason: reasons[reason] / max(len(answers), 1) for reason in ("stop", "length", "loop")}
    tokens = sum(len(answer["response_ids"]) for answer in answers)
    rate = ran["generated_tokens"] / ran["seconds"] if ran["seconds"] else 0.0
    ended = ", ".join(f"{share:.0%} {reason}" for reason, share in shares.items())
    speed = f"; {rate:.0f} tokens/s in this run" if rate else ""
    print(f"respond: {len(answers)} answers, {tokens} tokens, ended by: {ended}{speed}", flush=True)
    return {"answers": len(answers), "tokens": tokens, "finish": shares, "tokens_per_second": rate, "seconds": ran["seconds"]}
