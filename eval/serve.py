"""The engine run: the same prompts, the same lengths, through vLLM with every method, and the report made of it.

The methods are those of eval/methods.py, all at one temperature. Every figure is pooled."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from data.chat import all_prompt_ids, load_tokenizer, loop_start
from data.engine import engine_identity, generate_each
from data.errors import UserError
from data.prompts import write_jsonl_line
from data.record import OTHER, UNKNOWN, ChatRecord
from data.turns import Measured
from eval.accept import Counts, bootstrap, figures
from eval.advice import recommend
from eval.methods import check_methods, command, drafting, label, speculation

if TYPE_CHECKING:
    from train.config import RunConfig

MIN_TOKENS = 8  # shortest answer that is measured
LOOK_AHEAD = 16  # requests at a time in the run that only finds where the answers begin to loop, which is not timed

Result = dict[str, Any]  # what data.engine.generate returns
Request = dict[str, Any]  # {"id", "prompt_ids", "max_tokens"}


def make_requests(encoded: dict[str, list[int]], max_tokens: int, max_model_len: int, k: int) -> tuple[list[Request], int]:
    """Requests with room for their answer and one whole pass beyond it (nearer to max_model_len the engine shortens its
    drafts), and how many prompts were too long for that. encoded: id -> prompt token ids."""
    requests, skipped = [], 0
    for name, ids in encoded.items():
        room = max_model_len - len(ids) - k - 1
        if room < MIN_TOKENS:
            skipped += 1
            continue
        requests.append({"id": name, "prompt_ids": ids, "max_tokens": min(max_tokens, room)})
    if not requests:
        raise UserError(
            f"no evaluation prompt leaves room for an answer in target.max_model_len={max_model_len}: raise it, or use shorter prompts"
        )
    return requests, skipped


def cut_at_loops(requests: list[Request], plain: Result, ngram: int) -> tuple[list[Request], int]:
    """The requests with max_tokens at the place where their plain answer begins to loop (at least MIN_TOKENS), and how many
    were cut."""
    cut, count = [], 0
    for request in requests:
        start = loop_start(plain["outputs"][request["id"]]["token_ids"], ngram)
        limit = request["max_tokens"] if start is None else min(request["max_tokens"], max(MIN_TOKENS, start))
        count += limit < request["max_tokens"]
        cut.append({**request, "max_tokens": limit})
    return cut, count


def parted(result: Result, plain: Result) -> list[dict[str, Any]]:
    """Answers that differ from the plain run's: id, first differing position, and the two tokens there (None: one had
    ended)."""
    differing = []
    for name, output in result["outputs"].items():
        mine, theirs = output["token_ids"], plain["outputs"][name]["token_ids"]
        if mine != theirs:
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
            pick: Callable[[list[int]], int | None] = lambda ids, at=same: ids[at] if at < len(ids) else None  # noqa: E731
            differing.append({"id": name, "position": same, "plain": pick(theirs), "token": pick(mine)})
    return differing


def slices_of(records: list[ChatRecord]) -> dict[str, list[str]]:
    """Slice -> ids: each category, and each language where there are several."""
    slices: dict[str, list[str]] = {}
    for record in records:
        slices.setdefault(str(record.meta.get("category", OTHER)), []).append(record.id)
    languages = [str(record.meta.get("language", UNKNOWN)) for record in records]
    if len(set(languages)) > 1:
        for record, language in zip(records, languages, strict=True):
            slices.setdefault(f"language {language}", []).append(record.id)
    return slices


def pooled(result: Result, names: list[str]) -> dict[str, Any]:
    """Pooled figures of the named requests."""
    counts = Counts()
    for name in names:
        output = result["outputs"][name]
        counts.add(len(output["token_ids"]), output["drafts"], output["draft_tokens"], output["accepted_per_position"])
    return figures(counts)


def entry(method: str, found: Measured, slices: dict[str, list[str]], sampled: bool) -> dict[str, Any]:
    """One method of the report. slices: name -> request ids. sampled: at a temperature above 0, where the texts of two runs differ and
    `lossless` is None."""
    result, plain = found.result, found.reference or found.result
    names = list(result["outputs"])
    differing = [] if sampled else parted(result, plain)
    gone = {difference["id"] for difference in differing}
    speed, plain_speed = (r["output_tokens"] / r["seconds"] for r in (result, plain))
    each = [pooled(result, [name]) for name in result["outputs"]]
    speedup = speed / plain_speed
    return {
        "method": method,
        **pooled(result, names),
        "tokens_per_pass_interval": bootstrap([(f["output_tokens"], f["passes"]) for f in each], lambda sums: sums[0] / sums[1]),
        "seconds": result["seconds"],
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain_speed,
        "rounds": found.rounds,
        "itl_ms": median(result["itl_ms"]),
        "ttft_ms": median(result["ttft_ms"]),
        "speedup": speedup,
        "speedup_interval": [speedup * share for share in _spread(result, plain)],
        "lossless": None if sampled else 1 - len(gone) / len(names),
        "parted": differing,
        "slices": {
            name: {**pooled(result, part), "lossless": None if sampled else 1 - len(gone & set(part)) / len(part)}
            for name, part in slices.items()
        },
    }


def _times(result: Result) -> list[tuple[float, float]]:
    """(tokens, milliseconds from being asked to the last token) of each answer."""
    tokens = [len(output["token_ids"]) for output in result["outputs"].values()]
    return [(n, first + (n - 1) * between) for n, first, between in zip(tokens, result["ttft_ms"], result["itl_ms"], strict=True)]


def _spread(result: Result, plain: Result) -> tuple[float, float]:
    """95 % interval of the speed-up over prompts, the same prompts in both runs, in shares of its middle. Made of each request's own
    time, for the run's is one number; it does not hold what a second run on the same machine would do otherwise."""
    rows = [(*mine, *theirs) for mine, theirs in zip(_times(result), _times(plain), strict=True)]

    def figure(sums: Tensor) -> Tensor:
        tokens, time, plain_tokens, plain_time = sums
        return tokens / time * plain_time / plain_tokens

    low, high = bootstrap(rows, figure)
    middle = float(figure(torch.tensor(rows, dtype=torch.float64).sum(0)))
    return low / middle, high / middle


def write_answers(  # noqa: PLR0913
    path: Path, prompts: list[ChatRecord], requests: list[Request], plain: Result, longer: Result, temperature: float
) -> None:
    """The plain answers as response records, for the offline chain. tail_ids: what the target wrote beyond the answer in
    `longer`, where the two agree so far."""
    records = {record.id: record for record in prompts}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as f:
        for request in requests:
            name = request["id"]
            output, more = plain["outputs"][name], longer["outputs"][name]["token_ids"]
            ids = output["token_ids"]
            line = {"id": name, "messages": records[name].messages, "meta": records[name].meta, "prompt_ids": request["prompt_ids"]}
            line |= {"response_ids": ids, "finish_reason": output["finish_reason"], "sampling": {"temperature": temperature}}
            write_jsonl_line(f, {**line, "tail_ids": more[len(ids) :] if more[: len(ids)] == ids else []})


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"


def evaluate(cfg: RunConfig, target_dir: Path, export_dir: Path, prompts: list[ChatRecord], answers_path: Path) -> dict[str, Any]:
    """Runs every method of cfg.eval.methods over the prompts, with each k and at each concurrency, and returns the report (docs:
    report.json), without `offline`.

    Leaves the plain answers at answers_path. Slices are the prompts' categories and languages.
    """
    check_methods(cfg, target_dir, export_dir)
    engine = Engine(cfg, target_dir, export_dir)
    requests, about, longer = engine.asked(prompts)
    found = engine.run(cfg.eval.methods, requests, cfg.eval.concurrencies)
    plain = found["none", 0, cfg.eval.concurrencies[0]].result
    write_answers(answers_path, prompts, requests, plain, longer or plain, cfg.eval.temperature)
    asked = {request["id"] for request in requests}
    slices = slices_of([record for record in prompts if record.id in asked])
    methods = []
    for method, k in ((name, k) for name in cfg.eval.methods for k in ([0] if name == "none" else cfg.eval.ks)):
        for concurrency in cfg.eval.concurrencies:
            cell = entry(method, found[method, k, concurrency], slices, cfg.eval.temperature > 0)
            methods.append(cell | engine.setting(method, k, concurrency))
    return {
        "name": cfg.name,
        "target": {"model": cfg.target.model, "revision": cfg.target.revision, "dtype": cfg.eval.dtype or cfg.target.dtype},
        "engine": {**engine_identity(), "device": device_name()},
        "prompts": {
            "count": len(requests),
            "slices": {name: len(part) for name, part in slices.items()},
            **about,
        },
        "methods": methods,
        "recommendation": recommend(methods),
    }


@dataclass(frozen=True)
class Engine:
    """vLLM with the target of a run and any of its methods."""

    cfg: RunConfig
    target_dir: Path
    export_dir: Path

    def asked(self, prompts: list[ChatRecord]) -> tuple[list[Request], dict[str, Any], Result | None]:
        """The requests of every method; what a report says of them; and with eval.cut_loops the plain run in which the loops were found."""
        cfg, longer, loops = self.cfg, None, 0
        encoded = all_prompt_ids(load_tokenizer(self.target_dir, cfg.target.trust_remote_code), prompts)
        requests, skipped = make_requests(encoded, cfg.eval.max_tokens, cfg.target.max_model_len, max(cfg.eval.ks))
        if cfg.eval.cut_loops:
            ahead = max(LOOK_AHEAD, *cfg.eval.concurrencies)
            longer = self.run(["none"], requests, [ahead])["none", 0, ahead].result
            requests, loops = cut_at_loops(requests, longer, cfg.data.loop_ngram)
        about = {"skipped_too_long": skipped, "max_tokens": cfg.eval.max_tokens, "temperature": cfg.eval.temperature}
        return requests, {**about, "cut_loops": cfg.eval.cut_loops, "answers_cut": loops}, longer

    def run(self, methods: list[str], requests: list[Request], concurrencies: list[int]) -> dict[tuple[str, int, int], Measured]:
        """By method, k and concurrency. `none` is among the methods."""
        cfg, engines, cells = self.cfg, [], []
        for method in ["none", *(name for name in methods if name != "none")]:
            for one in drafting(cfg, method, self.export_dir):
                engines.append(one)
                cells += [(method, k, c) for k in one.ks for c in concurrencies]
        named = ", ".join(dict.fromkeys(label(method) for method, _, _ in cells))
        ks = f", k={', '.join(map(str, cfg.eval.ks))}" if len(engines) > 1 else ""
        at = f", concurrency {', '.join(map(str, concurrencies))}" if len(concurrencies) > 1 else ""
        print(f"evaluate: {named}{ks}{at}, {len(requests)} prompts", flush=True)
        found = generate_each(
            target_dir=self.target_dir,
            target_cfg=cfg.target,
            prompts=requests,
            engines=engines,
            dtype=cfg.eval.dtype or cfg.target.dtype,
            concurrencies=concurrencies,
            max_model_len=cfg.target.max_model_len,
            temperature=cfg.eval.temperature,
        )
        return dict(zip(cells, found, strict=True))

    def setting(self, method: str, k: int, concurrency: int) -> dict[str, Any]:
        """How a method was run, and the command that serves it. A greedy draft is kept with the probability that the target gives it, a
        probabilistic one with min(1, p / q)."""
        speculative, overrides = speculation(self.cfg, method, k, self.export_dir)
        return {
            "k": k,
            "temperature": self.cfg.eval.temperature,
            "concurrency": concurrency,
            "speculative_config": speculative,
            "draft_sample_method": (speculative or {}).get("draft_sample_method", "greedy"),
            "command": command(self.target_dir, self.cfg.eval.dtype or self.cfg.target.dtype, speculative, overrides),
        }
