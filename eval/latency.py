"""Latency as a client of vLLM's own server sees it: each method served, and measured by vLLM's own benchmark at each concurrency.

Unlike eval/serve.py, which drives the engine itself, this has the whole way of an answer in it: HTTP, tokenizer, streaming, scheduling."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from data.chat import load_tokenizer, prompt_text
from data.commands import command
from data.engine import decoding, engine_identity
from data.engine_job import cache_bytes, weight_bytes
from data.errors import UserError
from data.lock import alone
from data.manifest import replace_text
from data.prompts import write_jsonl_line
from data.record import ChatRecord
from eval.advice import FEWEST
from eval.methods import check_methods, label, server, shell, speculation
from eval.report import draw, finished
from eval.run import checked, export_of
from eval.serve import Engine, Request, device_name
from eval.server import bench, flags, serving

if TYPE_CHECKING:
    from train.config import RunConfig

VERSION = 1  # of latency.json; another is measured anew
TIMES = ("ttft", "tpot", "itl", "e2el")  # as the client names them: to the first token, per token after it, between arrivals, to the last
WARM_UPS = 2


def latency(cfg: RunConfig, target_dir: Path, prompts: list[ChatRecord]) -> None:
    """Measures every method of cfg.eval.methods with each k at each concurrency over the prompts, and writes eval/latency.json after each
    server; what is there with the same settings is not measured again."""
    if cfg.eval.temperature:
        raise UserError(
            f"eval.temperature={cfg.eval.temperature:g}: latency is measured at temperature 0; sampled answers: `{command('evaluate')}`"
        )
    engine = {**engine_identity(), "device": device_name()}
    settings = {"latency": VERSION, "engine": engine, **checked(cfg, target_dir, prompts)}
    check_methods(cfg, target_dir, export_of(cfg))
    folder = Path(cfg.run_dir) / cfg.eval_folder
    path, cells = folder / "latency.json", _cells(cfg)
    with alone(folder, "run_dir"):
        report = finished(path, settings)
        if report is None and path.is_file():
            print(f"latency: {path} is of other settings and will be replaced; copy it now if it is wanted", flush=True)
        if report is None or len(report["methods"]) < len(cells) * len(cfg.eval.concurrencies):
            report = _measure(cfg, target_dir, prompts, path, report or {"settings": settings})
        draw(folder)
    show(report, path)


def _cells(cfg: RunConfig) -> list[tuple[str, int]]:
    return [(method, k) for method in cfg.eval.methods for k in ([0] if method == "none" else cfg.eval.ks)]


def _measure(cfg: RunConfig, target_dir: Path, prompts: list[ChatRecord], path: Path, report: dict[str, Any]) -> dict[str, Any]:
    requests, about, _ = Engine(cfg, target_dir, export_of(cfg)).asked(prompts)
    report |= {"name": cfg.name, "engine": report["settings"]["engine"], "prompts": {"count": len(requests), **about}}
    methods = report.setdefault("methods", [])
    scratch = Path(tempfile.mkdtemp(prefix="draftsmith-"))
    write_requests(scratch / "prompts.jsonl", cfg, target_dir, prompts, requests)
    for method, k in _cells(cfg):
        if any((m["method"], m["k"]) == (method, k) for m in methods):
            continue
        parts = served(cfg, target_dir, requests, method, k)
        told = f"{label(method)}{f', k={k}' if k else ''}"
        print(f"latency: {told}: starting the server", flush=True)
        found = []
        with serving(parts, cfg.target.tensor_parallel, scratch / "server.log") as port:
            for concurrency in cfg.eval.concurrencies:
                print(f"latency: {told}, concurrency {concurrency}, {len(requests)} prompts", flush=True)
                saved = bench(client_words(cfg, target_dir, scratch, len(requests), concurrency), port, scratch)
                found.append({"method": method, "k": k, "concurrency": concurrency, **figures(saved), "command": shell(parts)})
        methods += found
        replace_text(path, json.dumps(report, indent=1, allow_nan=False) + "\n")
    shutil.rmtree(scratch)
    return report


def write_requests(path: Path, cfg: RunConfig, target_dir: Path, prompts: list[ChatRecord], requests: list[Request]) -> None:
    """The requests as the client reads them, in their order: each prompt as the text that the chat template makes of it."""
    tokenizer, records = load_tokenizer(target_dir, cfg.target.trust_remote_code), {record.id: record for record in prompts}
    with path.open("w", encoding="utf-8") as f:
        for request in requests:
            write_jsonl_line(f, {"prompt": prompt_text(tokenizer, records[request["id"]]), "output_tokens": request["max_tokens"]})


def served(cfg: RunConfig, target_dir: Path, requests: list[Request], method: str, k: int) -> list[list[str]]:
    """The words of the server: the report's serving command, with the sizes that its engine has in eval/serve.py. Without prefix caching,
    for the same prompts come again."""
    (speculative, overrides), dtype = speculation(cfg, method, k, export_of(cfg)), cfg.eval.dtype or cfg.target.dtype
    sizes = {"dtype": dtype, "seqs": max(cfg.eval.concurrencies), "max_model_len": cfg.target.max_model_len}
    llm, cache = decoding(target_dir, cfg.target, requests, speculative, **sizes)
    if not llm["enforce_eager"]:  # on a GPU, where vLLM measures what is left for the cache
        cache = {}
    more = {key: value for key, value in llm.items() if key not in ("model", "dtype")}
    job = {"llm": llm, "states": False, "weight_bytes": weight_bytes(llm), **cache}
    more |= {"kv_cache_memory_bytes": cache_bytes(job)} if cache else {}
    return [*server(target_dir, dtype, speculative, overrides), flags(more)]


def client_words(cfg: RunConfig, target_dir: Path, folder: Path, count: int, concurrency: int) -> list[str]:
    """What vLLM's client is told: all prompts once, as they stand, greedily, the next as soon as one of `concurrency` is answered."""
    options = {
        "model": target_dir,
        "dataset-name": "custom",
        "dataset-path": folder / "prompts.jsonl",
        "custom-output-len": -1,  # that of each request
        "num-prompts": count,
        "max-concurrency": concurrency,
        "num-warmups": WARM_UPS,
        "temperature": 0,
        "repetition-penalty": 1,  # else the target's own generation_config.json counts, which eval/serve.py leaves out
        "extra-body": json.dumps({"add_special_tokens": False}),  # the template has put them in
        "percentile-metrics": ",".join(TIMES),
        "metric-percentiles": "50,99",
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    words += ["--skip-chat-template", "--disable-shuffle", "--no-oversample", "--disable-tqdm"]
    return words + ["--trust-remote-code"] * cfg.target.trust_remote_code


def figures(saved: dict[str, Any]) -> dict[str, Any]:
    """One entry of latency.json from what the client saves. Times in milliseconds; the counts of drafts are the server's own, by its
    metrics before and after."""
    found = {
        "requests": saved["completed"],
        "output_tokens": saved["total_output_tokens"],
        "seconds": saved["duration"],
        "requests_per_second": saved["request_throughput"],
        "tokens_per_second": saved["output_throughput"],
    }
    for name in TIMES:
        found[f"{name}_ms"] = {which: saved[f"{which}_{name}_ms"] for which in ("mean", "median", "p99")}
    drafts = saved.get("spec_decode_num_drafts", 0)
    found |= {"drafts": drafts, "draft_tokens": saved.get("spec_decode_draft_tokens", 0)}
    found |= {"accepted_tokens": saved.get("spec_decode_accepted_tokens", 0)}
    found["acceptance_length"] = 1 + found["accepted_tokens"] / drafts if drafts else 1.0
    return found | {"acceptance_per_position": saved.get("spec_decode_per_position_acceptance_rates", [])}


def table(report: dict[str, Any]) -> Table:
    """One row a method, k and concurrency; times as median and p99. At most 80 columns wide for times below ten seconds."""
    title = f"{report['name']}: {report['prompts']['count']} prompts through vLLM's server, times in ms: median/p99"
    drawn = Table(title=title, box=SIMPLE, padding=0)
    for column in ("", "in\nflight", "k", "accept\nlength", "req\n/s", "tok\n/s", "speed", "TTFT", "TPOT", "ITL"):
        drawn.add_column(column, justify="right" if column else "left", no_wrap=True)
    last, plain = None, {m["concurrency"]: m["tokens_per_second"] for m in report["methods"] if m["method"] == "none"}
    for m in sorted(report["methods"], key=lambda m: m["concurrency"]):
        if last not in (None, m["concurrency"]):
            drawn.add_section()
        last = m["concurrency"]
        row = [label(m["method"]), str(last), str(m["k"] or "-"), f"{m['acceptance_length']:.2f}" if m["drafts"] else "-"]
        row += [_short(m["requests_per_second"]), _short(m["tokens_per_second"]), f"{m['tokens_per_second'] / plain[last]:.2f}x"]
        drawn.add_row(*row, *(f"{_short(m[name]['median'])}/{_short(m[name]['p99'])}" for name in ("ttft_ms", "tpot_ms", "itl_ms")))
    return drawn


def _short(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def show(report: dict[str, Any], path: Path) -> None:
    console = Console()
    console.print(table(report))
    if (count := report["prompts"]["count"]) < FEWEST:
        console.print(f"{count} prompts are too few to tell a gain from chance, it takes {FEWEST} or more (eval.limit).")
    console.print(f"{path}", markup=False)
