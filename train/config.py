"""The typed spine: every key that a conf or the command line may set, and the checks that need more than one key.

Composed once per process by `load`; everything below receives these dataclasses, never a DictConfig.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SamplingConfig:
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0  # 0: off
    max_tokens: int = 512
    samples: int = 1  # answers per training prompt


@dataclass
class TargetConfig:
    model: str = "???"  # hub id, local folder, or `builtin:smollm2` / `builtin:tiny`
    revision: str | None = None
    dtype: str = "bfloat16"  # dtype in which the target is served and its states are captured
    trust_remote_code: bool = False
    max_model_len: int = 4096
    spec: dict[str, Any] = field(default_factory=dict)  # dimensions, for planning without weights; checked against config.json where there is one


@dataclass
class DataConfig:
    prompts: list[str] = field(default_factory=list)  # files, folders or hub data sets; relative paths count from the repository
    limit: int | None = None  # training prompts used; null: all (spread over the slices)
    heldout_limit: int | None = None
    responses: str = "???"  # folder with the target's answers: train.jsonl, heldout.jsonl
    store: str = "???"  # folder with the hidden states: train/, heldout/
    max_length: int = 4096  # tokens of prompt + response; longer ones are cut and counted
    cut_loops: bool = False  # cut an answer where an n-gram of `loop_ngram` tokens returns
    loop_ngram: int = 8
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_store_gb: float = 500.0
    states_dtype: str = "bfloat16"
    batch_size: int = 128  # sequences in flight in the engine while responding


@dataclass
class TrainConfig:
    steps: int = 1000
    micro_tokens: int = 4096  # tokens of one micro-batch on one rank (packed)
    accum: int = 1
    seed: int = 0
    dtype: str = "bfloat16"
    val_every: int = 200
    save_every: int = 500
    keep: int = 2
    log_every: int = 10
    threads: int | None = None  # CPU threads per rank


@dataclass
class OptimConfig:
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    schedule: str = "cosine"  # cosine | wsd | constant
    warmup: float = 0.04  # share of steps
    decay: float = 0.2  # wsd: share of steps at the end
    min_lr_ratio: float = 0.05


@dataclass
class EvalConfig:
    k: int = 3
    methods: list[str] = field(default_factory=lambda: ["none", "ngram", "head"])
    limit: int | None = None  # held-out prompts used
    max_tokens: int = 128
    concurrency: int = 1
    dtype: str | None = None  # null: the target's
    cut_loops: bool = False


@dataclass
class LogConfig:
    wandb: bool = True
    project: str = "draftsmith"
    every_console: int = 1


@dataclass
class RunConfig:
    name: str = "???"
    run_dir: str = "runs/${name}"
    target: TargetConfig = field(default_factory=TargetConfig)
    head: dict[str, Any] = field(default_factory=dict)  # _target_: heads.<file>.<Class> and its keyword arguments
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    zero: dict[str, Any] = field(default_factory=dict)  # DeepSpeed's zero_optimization section
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    dry_run: bool = False
