"""Between data/engine.py and its child process: the engine's settings, its cache size by our own estimate, and the run itself."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from data.errors import UserError
from data.progress import Progress
from data.prompts import write_jsonl_line
from data.target import read_json
from heads.base import TargetSpec

if TYPE_CHECKING:
    from train.config import TargetConfig

ROOT = Path(__file__).resolve().parent.parent
MARK = "\x1edraftsmith "  # begins a line of progress on the child's stdout
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # not meant for the engine
# Their classes in vLLM hand out no residual streams: the classes of our plug-in that do.
CAPTURED_AS = {"MiMoForCausalLM": "DraftsmithMiMo", "Glm4MoeForCausalLM": "DraftsmithGlm4Moe"}
LOG_LINES = 12  # of a dead child, shown in the error


def llm_settings(
    target_dir: Path, target: TargetConfig, *, dtype: str, max_model_len: int, seqs: int, compiled: bool, k: int = 0
) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM that every task sets. seqs: sequences in flight; k: drafts per pass."""
    return {
        "model": str(target_dir.absolute()),
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(8192 if torch.cuda.is_available() else 2048, seqs * (k + 1)),
        "enforce_eager": not compiled,
        "enable_prefix_caching": False,
        "tensor_parallel_size": target.tensor_parallel,
        "trust_remote_code": target.trust_remote_code,
    }


def captured_as(target: TargetSpec) -> dict[str, Any]:
    """Settings for a capture of a target whose class in vLLM hands out no residual streams."""
    ours = CAPTURED_AS.get(target.architecture)
    return {"hf_overrides": {"architectures": [ours]}} if ours else {}


def whole_prompts(llm: dict[str, Any]) -> dict[str, Any]:
    """Settings for sampling with seeds on a CPU: no part of a prompt. After a part vLLM turns the request's own generator back, which
    a CPU generator cannot do."""
    if torch.cuda.is_available():
        return {}
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(llm["max_num_batched_tokens"], llm["max_model_len"])}


def cache_plan(target: TargetSpec, llm: dict[str, Any], *, tokens: int, layers: int, hidden_states: int = 0) -> dict[str, int]:
    """Bytes of engine cache: cache_need for `tokens` in flight, cache_least for one sequence of max_model_len.

    vLLM allots one pool of blocks over all layers. Captured states (`hidden_states` residual streams per token) are a cache group of
    one layer, so each of their blocks takes a whole pool block: far more than their own bytes. vLLM's estimate of that refuses
    starts that succeed; this one is exact for plain attention.
    """
    itemsize = getattr(torch, llm["dtype"]).itemsize
    block = 16 if torch.cuda.is_available() else 128
    shapes = [(target.num_kv_heads, target.head_dim)] + [(x["num_kv_heads"], x["head_dim"]) for x in (target.kinds or {}).values()]
    # where layers differ, smaller ones get larger blocks until all pages are of one size
    page = block * 2 * max(math.ceil(heads / llm["tensor_parallel_size"]) * size for heads, size in shapes) * itemsize
    state_block = 0
    if state := hidden_states * target.hidden_size * itemsize:
        scale = math.ceil(state / page)  # vLLM widens its blocks until one token's states fit a page
        block, page = block * scale, page * scale
        state_block = max(d for d in range(1, page // state + 1) if block % d == 0)

    def blocks(tokens: int, seqs: int) -> int:
        return tokens // block + seqs + (tokens // state_block + seqs if state_block else 0)

    pool = layers * page
    least = blocks(llm["max_model_len"], 2) * pool
    return {"cache_need": max(least, blocks(tokens, llm["max_num_seqs"] + 1) * pool), "cache_least": least}


def weight_bytes(llm: dict[str, Any]) -> int:
    """Of the target, on each device."""
    return _tensor_bytes(llm["model"]) // llm["tensor_parallel_size"]


def _tensor_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def cache_bytes(job: dict[str, Any]) -> int | None:
    """Bytes of cache to ask for: what the job needs at once, as far as memory goes; None lets vLLM measure (GPU, plain decoding).

    Raises UserError where not even one sequence fits.
    """
    need, least = job["cache_need"], job["cache_least"]
    if torch.cuda.is_available():
        if not job["states"]:
            return None
        free = torch.cuda.mem_get_info()[0] * 0.92 - 4 * 2**30  # what vLLM leaves free of its own accord; activations
    else:
        free = psutil.virtual_memory().available * 0.8
    room = int(free - job["weight_bytes"])
    if room < least:
        raise UserError(
            f"the engine's cache needs {least / 2**30:.1f} GiB for one sequence of {job['llm']['max_model_len']} tokens, and "
            f"{max(room, 0) / 2**30:.1f} GiB are free: lower data.max_length or target.max_model_len, or raise target.tensor_parallel"
        )
    return min(need, room)


def side_by_side(engines: list[dict[str, Any]]) -> list[list[int]]:
    """The engines of a measurement in groups that are alive together, by their places. On a CPU as many as memory holds, each group with
    plain decoding, which comes first; where that is one, on a GPU, and where an engine has processes of its own, each alone."""
    if torch.cuda.is_available() or engines[0]["llm"]["tensor_parallel_size"] > 1:
        return [[i] for i in range(len(engines))]
    # Weights beside what they are read from and repacked to; the process itself.
    needs = [int(1.5 * (weight_bytes(e["llm"]) + draft_bytes(e["speculative"]))) + e["cache_need"] + 2**30 for e in engines]
    room, groups = psutil.virtual_memory().available * 0.8, []
    for i in range(1, len(engines)):
        if groups and sum(needs[j] for j in groups[-1]) + needs[i] <= room:
            groups[-1].append(i)
        else:
            groups.append([0, i])
    alone = any(sum(needs[i] for i in group) > room for group in groups)
    return [[i] for i in range(len(engines))] if alone or not groups else groups


def draft_bytes(speculative: dict[str, Any] | None) -> int:
    """Of a draft's weights; 0 for a method that has none."""
    model = (speculative or {}).get("model")
    return _tensor_bytes(model) if model else 0


def stop_ids(target_dir: Path) -> list[int]:
    """The ids that end an answer, as vLLM takes them with a tokenizer: of generation_config.json or else config.json, and its eos."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = target_dir / name
        eos = read_json(path).get("eos_token_id") if path.exists() and not found else None
        found |= set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    settings, vocabulary = target_dir / "tokenizer_config.json", target_dir / "tokenizer.json"
    if settings.exists() and vocabulary.exists():
        eos = read_json(settings).get("eos_token")
        text = eos["content"] if isinstance(eos, dict) else eos
        added = read_json(vocabulary).get("added_tokens", [])
        found |= {token["id"] for token in added if token["content"] == text}
    if not found:
        raise UserError(f"{target_dir}: no eos_token_id in generation_config.json or config.json, so answers would never end: add it there")
    return sorted(found)


def request_seed(name: str, base: int) -> int:
    """A seed that depends on the request alone, so that neither batching nor a resume changes what is sampled."""
    return int.from_bytes(hashlib.sha256(f"{base}:{name}".encode()).digest()[:4], "big") >> 1


class LoopWatch:
    """Finds, token by token, where an n-gram of an answer begins for the second time (as data.chat.loop_start does on the whole)."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.seen: set[tuple[int, ...]] = set()
        self.read = 0

    def cut(self, ids: list[int]) -> int | None:
        """`ids`: the answer so far, which only grows from call to call. Returns the index to cut at, or None."""
        while self.read < len(ids):
            self.read += 1
            if self.read < self.n:
                continue
            gram = tuple(ids[self.read - self.n : self.read])
            if gram in self.seen:
                return self.read - self.n
            self.seen.add(gram)
        return None


def run_child(job: dict[str, Any], items: Iterable[dict[str, Any]], label: str, total: int, unit: str) -> dict[str, Any]:
    """Runs `job` over `items` in a child with vLLM, showing its progress (`total` `unit`), and returns its result.

    UserError: vLLM is missing, the child says what is wrong, or it died; then with the last lines of its log, which is kept.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError("vllm is not installed: make setup")
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-"))
    with (folder / "items.jsonl").open("w", encoding="utf-8") as f:
        for item in items:
            write_jsonl_line(f, item)
    result, log = folder / "result.json", folder / "engine.log"
    job = {**job, "items": str(folder / "items.jsonl"), "result": str(result), "weight_bytes": weight_bytes(job["llm"])}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    print(f"{label}: starting vLLM", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "data.engine_child", str(os.getpid()), str(folder / "job.json")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(job["llm"]["tensor_parallel_size"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    try:
        _follow(process, log, Progress(label, total, unit))
        code = process.wait()
    finally:
        process.kill()
    if not result.exists():
        raise dead(label, code, log)
    answer = json.loads(result.read_text(encoding="utf-8"))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def environment(gpus: int) -> dict[str, str]:
    """The child's environment: one process, quiet, offline (the target is a local folder), our cache size instead of the variable's, and
    under torchrun its own `gpus` of this machine's."""
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
    ours["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # a capture of max_position_embeddings tokens asks for one more, never used
    kept = {key: value for key, value in os.environ.items() if key not in TORCHRUN and key != "VLLM_CPU_KVCACHE_SPACE"}
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        there = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        first, engines = int(os.environ["LOCAL_RANK"]) * gpus, int(os.environ["LOCAL_WORLD_SIZE"])
        if engines * gpus > len(there.split(",")):
            raise UserError(
                f"{engines} engines of target.tensor_parallel={gpus} on the GPUs {there}: start fewer with torchrun, or lower it"
            )
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(there.split(",")[first : first + gpus])
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return {"VLLM_LOGGING_LEVEL": "ERROR", **kept, **ours, "PYTHONPATH": path}


def _follow(process: subprocess.Popen[str], log: Path, progress: Progress) -> None:
    """Shows the child's progress until it ends its output; the rest goes to `log`, and to the console if a log level was asked for."""
    assert process.stdout is not None
    echo = "VLLM_LOGGING_LEVEL" in os.environ
    with progress, log.open("w", encoding="utf-8") as f:
        for line in process.stdout:
            if line.startswith(MARK):
                progress.update(**json.loads(line.removeprefix(MARK)))
                continue
            f.write(line)
            f.flush()
            if echo:
                print(line, end="", file=sys.stderr)


def dead(label: str, code: int, log: Path, what: str = "engine", sizes: str = "data.batch_size, data.max_length") -> UserError:
    """What to say of a process, `what`, that ended with `code`. log: its output; sizes: keys that its memory goes by, beside
    target.max_model_len."""
    with log.open(encoding="utf-8") as f:
        last = "".join(deque((line for line in f if line.strip()), LOG_LINES))
    if code == -9 or "out of memory" in last.lower() or "No available memory for the cache" in last:
        mend = f"it lacked memory: lower {sizes} or target.max_model_len"
    else:
        mend = "VLLM_LOGGING_LEVEL=INFO shows what it does"
    return UserError(f"{label}: the {what} stopped with exit code {code}; {mend}. Its last lines, all of them in {log}:\n{last}")
