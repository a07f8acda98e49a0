"""What types alone do not say of a config: one message that names the key, its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from data.teacher import top_k

if TYPE_CHECKING:
    from train.config import RunConfig

ALGORITHMS = ("adamw", "muon")
SCHEDULES, DTYPES = ("cosine", "wsd", "constant"), ("bfloat16", "float32")
QUANTIZATION = ("int8", "int4", "fp8")
METHODS = ("none", "ngram", "suffix", "draft_model", "head")  # of evaluation
ANSWERS, STATES, STATES_DTYPES = ("target", "given"), ("store", "online"), (*DTYPES, "fp8")

AT_LEAST_1 = """train.steps train.accum train.sequence_parallel train.micro_tokens train.val_every train.save_every train.keep
    train.log_every data.max_length data.loop_ngram data.batch_size data.sampling.max_tokens data.sampling.samples
    eval.max_tokens log.every_console target.max_model_len target.tensor_parallel""".split()

NOT_NEGATIVE = """data.min_prompt_chars optim.eps optim.weight_decay data.sampling.temperature data.sampling.top_k train.seed
    train.chain_docs""".split()


def check(run: RunConfig, root: Path) -> None:
    """What types alone do not say. Raises UserError naming the key, its value and what is allowed.

    root: the repository, no part of whose path may be a folder that a run writes."""

    def need(key: str, ok: Callable[[Any], bool], what: str) -> None:
        value: Any = run
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        if not ok(value):
            raise UserError(f"{key}={value}: must be {what}")

    for key in AT_LEAST_1:
        need(key, lambda v: v >= 1, "1 or more")
    for key in ("train.threads", "data.limit", "data.heldout_limit", "data.max_prompt_chars", "eval.limit"):
        need(key, lambda v: v is None or v >= 1, "1 or more, or null")
    need("data.states", lambda v: v in STATES, f"one of {', '.join(STATES)}")
    need("data.states_dtype", lambda v: v in STATES_DTYPES, f"one of {', '.join(STATES_DTYPES)}")
    stored = run.data.states == "store"
    kept = "last or top<k>, as top32" if stored else "last with data.states=online, where nothing is stored"
    need("data.teacher", lambda v: v == "last" or (stored and top_k(v) is not None), kept)
    for key in ("train.dtype", "target.dtype"):
        need(key, lambda v: v in DTYPES, f"one of {', '.join(DTYPES)}, auto")
    need("data.answers", lambda v: v in ANSWERS, f"one of {', '.join(ANSWERS)}")
    need("data.server", lambda v: v is None or v.startswith(("http://", "https://")), "an address, as http://host:8000/v1, or null")
    for key in NOT_NEGATIVE:
        need(key, lambda v: 0 <= v < math.inf, "0 or more")
    most = run.data.max_store_gb if run.data.states == "store" else 0
    allowed = f"null or a number of gigabytes up to data.max_store_gb={most:g}" if most else "null with data.states=online"
    need("data.window_gb", lambda v: v is None or 0 < v <= most, allowed)
    need("data.max_store_gb", lambda v: v > 0, "a positive number of gigabytes")
    longest = run.target.spec.get("max_positions", math.inf)
    need("target.max_model_len", lambda v: v <= longest, f"at most {longest}, the positions that the target knows (target.spec)")
    need("name", lambda v: bool(v.strip()), "a name")
    need("data.sampling.top_p", lambda v: 0 < v <= 1, "in (0, 1]")
    need("export.quantization", lambda v: v in (None, *QUANTIZATION), f"null or one of {', '.join(QUANTIZATION)}")
    _check_optim(run, need)
    _check_eval(run, need)
    _check_groups(run, root)


def _ascending(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return bool(numbers) and all(type(n) is int and n >= 1 for n in numbers) and numbers == sorted(set(numbers))


def _check_optim(run: RunConfig, need: Callable[[str, Callable[[Any], bool], str], None]) -> None:
    for key in ("optim.lr", "optim.adam_lr"):
        need(key, lambda v: math.isfinite(v) and v > 0, "a positive number")
    need("optim.algorithm", lambda v: v in ALGORITHMS, f"one of {', '.join(ALGORITHMS)}")
    need("optim.momentum", lambda v: 0 <= v < 1, "in [0, 1)")
    need("optim.clip", lambda v: v >= 0, "0 (no clipping) or a positive norm")
    if run.optim.algorithm == "muon":  # DeepSpeed would clip the updates, whose norm says nothing of the gradient's
        need("optim.clip", lambda v: v == 0, "0 with optim.algorithm=muon, as optim=muon has it: the gradient's size does not count")
    for key in ("optim.warmup", "optim.decay", "optim.min_lr_ratio"):
        need(key, lambda v: 0 <= v <= 1, "a share between 0 and 1")
    need("optim.schedule", lambda v: v in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
    need("optim.betas", lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "two numbers in [0, 1)")


def _check_eval(run: RunConfig, need: Callable[[str, Callable[[Any], bool], str], None]) -> None:
    for key in ("eval.k", "eval.concurrency"):
        need(key, _ascending, "a whole number of 1 or more, or a list of such in ascending order, as in [1,2,4]")
    need("eval.temperature", lambda v: 0 <= v < math.inf, "0 or more")
    methods = ("greedy", "probabilistic") if run.eval.temperature else ("greedy",)
    said = f"{' or '.join(methods)}{'' if run.eval.temperature else ' with eval.temperature=0, where nothing is sampled'}"
    need("eval.draft_sample_method", lambda v: v in methods, said)
    need("eval.dtype", lambda v: v is None or v in DTYPES, f"null or one of {', '.join(DTYPES)}")
    several = f"`none`, to which the others are compared, and others of {', '.join(METHODS)}, or folders of heads (with a /), each once"
    named = {method for method in run.eval.methods if "/" not in method}
    need("eval.methods", lambda v: "none" in v and named <= set(METHODS) and len(set(v)) == len(v), several)
    if "draft_model" in named:
        need("eval.draft_model", bool, "the folder of a language model with the target's tokenizer, for the method draft_model")


def _check_groups(run: RunConfig, root: Path) -> None:
    for key, path in (("run_dir", run.run_dir), ("data.responses", run.data.responses), ("data.store", run.data.store)):
        if root.is_relative_to(Path(path).resolve()):  # so it is where it was left empty
            raise UserError(f"{key}={path}: must be a folder of its own")
    if not str(run.head.get("_target_", "")).startswith("heads."):
        raise UserError(f"head._target_={run.head.get('_target_')}: must name a class under heads., as conf/head/*.yaml do")
    if type(run.zero.get("stage")) is not int or run.zero["stage"] not in (1, 2, 3):
        raise UserError(f"zero.stage={run.zero.get('stage')}: must be 1, 2 or 3; as conf/zero/*.yaml have it")
