"""The typed spine: every key that a conf or the command line may set; what a value may be beyond its type is in train/checks.py.

Composed once per process by `load`; everything below receives these dataclasses, never a DictConfig.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from data.commands import remember
from data.errors import UserError
from data.packages import measured_only
from train import checks, dist
from train.words import check_words

ROOT = Path(__file__).resolve().parent.parent  # relative paths of a conf count from here, never from the working directory
CONF = ROOT / "conf"
# What the system may say of a path that a user named, or of a full disk: theirs to mend, so said in one line.
PATH_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOSPC, errno.EDQUOT}


@dataclass
class SamplingConfig:
    temperature: float = 0.8  # of the sampled answers
    top_p: float = 0.95  # the likeliest tokens that together have this probability; 1: off
    top_k: int = 0  # the likeliest tokens that are kept; 0: off
    max_tokens: int = 512  # of an answer
    samples: int = 1  # answers per training prompt
    greedy: bool = False  # the first answer to each prompt at temperature 0


@dataclass
class TargetConfig:
    model: str = "???"  # hub id, local folder, or `builtin:smollm2` / `builtin:tiny`
    revision: str | None = None  # of a hub id
    dtype: str = "bfloat16"  # in which the target is served and its states computed; auto: see dist.usual_dtype
    trust_remote_code: bool = False  # whether the target's own code may run
    max_model_len: int = 4096  # tokens of prompt and answer that the engine makes room for
    tensor_parallel: int = 1  # GPUs that the engine spreads one copy of the target over
    spec: dict[str, Any] = field(default_factory=dict)  # dimensions, to plan without weights; checked against config.json


@dataclass
class DataConfig:
    prompts: list[str] = field(default_factory=list)  # files, folders, hub data sets, package:<name>, self:<n>; paths: from the repository
    limit: int | None = None  # training prompts used; null: all (spread over the slices)
    heldout_limit: int | None = None  # held-out prompts used; null: all
    min_prompt_chars: int = 0  # characters of a conversation up to its answer; others are put aside and counted
    max_prompt_chars: int | None = None  # null: any number
    answers: str = "target"  # or given: train on the answers that the conversations hold; held-out ones stay the target's own
    server: str | None = None  # that serves the target elsewhere, as http://host:8000/v1; its key: OPENAI_API_KEY
    responses: str = "???"  # folder with the target's answers: train.jsonl, heldout.jsonl
    store: str = "???"  # folder with the hidden states: train/, heldout/
    states: str = "store"  # or online: each training rank runs the target for its own batches, and nothing is stored; for small targets
    max_length: int = 4096  # tokens of prompt + response; longer ones are cut and counted
    cut_loops: bool = False  # cut an answer where an n-gram of `loop_ngram` tokens returns
    loop_ngram: int = 8  # tokens
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_store_gb: float = 500.0  # a store that would take more is refused
    window_gb: float | None = None  # of training states on disk at once: capture runs ahead of the training by no more; null: all
    states_dtype: str = "bfloat16"  # on disk; float32; or fp8: taps in e4m3, last in 10 bits, with scales
    teacher: str = "last"  # or top<k>, as top32: the target's k likeliest tokens, for heads that read the last state as their teacher alone
    batch_size: int = 128  # sequences in flight in the engine while responding

    @property
    def whole_splits(self) -> tuple[str, ...]:
        """What lies whole in the store."""
        return () if self.states == "online" else ("train", "heldout") if self.window_gb is None else ("heldout",)

    @property
    def prompt_chars(self) -> tuple[int, int | None]:
        return self.min_prompt_chars, self.max_prompt_chars


@dataclass
class TrainConfig:
    steps: int = 1000  # optimizer steps
    micro_tokens: int = 4096  # tokens of one micro-batch on one rank (packed)
    accum: int = 1  # micro-batches of a rank in a step
    sequence_parallel: int = 1  # neighbouring ranks that share each micro-batch, each a run of its labels: for long documents
    recompute: bool = False  # keep of each depth its inputs alone, and work it out again in the backward: less memory, more time
    compile: bool = False  # make one pass over memory of each element-wise function of the layers and the loss: faster steps, a slow first
    seed: int = 0  # of the order of the data and of the first weights
    dtype: str = "bfloat16"  # or float32, or auto
    val_every: int = 200  # steps between two looks at the held-out loss
    chain_docs: int = 16  # held-out answers that each of these looks also walks as an engine does, which gives acceptance; 0: none
    save_every: int = 500  # steps between two checkpoints
    keep: int = 2  # checkpoints; older ones are deleted
    log_every: int = 10  # steps that a line of metrics.jsonl is a mean over
    threads: int | None = None  # CPU threads per rank
    init: str | None = None  # a run, one of its steps, or a head as the engine loads it, whose weights a new run begins with


@dataclass
class OptimConfig:
    algorithm: str = "adamw"  # or muon: matrices by Muon, vectors and tables of tokens by AdamW
    lr: float = 1e-3  # the highest rate of the schedule, AdamW's or Muon's
    adam_lr: float = 1e-3  # of what AdamW trains, which confs state; `lr` is the same where nothing is Muon's
    momentum: float = 0.95  # muon
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # AdamW
    eps: float = 1e-8  # AdamW
    weight_decay: float = 0.0  # of matrices
    clip: float = 1.0  # of the gradient's norm; 0: off, as Muon wants it
    schedule: str = "cosine"  # cosine | wsd | constant
    warmup: float = 0.04  # share of steps
    decay: float = 0.2  # wsd: share of steps at the end
    min_lr_ratio: float = 0.05  # rate at the end, as a share of the highest


@dataclass
class EvalConfig:
    k: Any = 3  # drafts per pass; or a list of numbers, to compare them
    methods: list[str] = field(default_factory=lambda: ["none", "ngram", "head"])  # names, or folders of published heads
    draft_model: str | None = None  # folder of the language model that the method of this name drafts with
    limit: int | None = None  # held-out prompts used
    max_tokens: int = 128  # of an answer
    concurrency: Any = 1  # requests in flight; or a list of numbers
    temperature: float = 0.0  # of the target
    draft_sample_method: str = "greedy"  # probabilistic: drafts are sampled from the head's own distribution, where temperature is above 0
    dtype: str | None = None  # null: the target's
    cut_loops: bool = False  # as data.cut_loops, for the measured answers

    @property
    def ks(self) -> list[int]:
        return self.k if isinstance(self.k, list) else [self.k]

    @property
    def concurrencies(self) -> list[int]:
        return self.concurrency if isinstance(self.concurrency, list) else [self.concurrency]


@dataclass
class ExportConfig:
    quantization: str | None = None  # int8, int4 or fp8 weights; null: the target's dtype


@dataclass
class LogConfig:
    wandb: bool = True  # false: console and metrics.jsonl only
    project: str = "draftsmith"  # of W&B
    every_console: int = 1  # lines of metrics.jsonl for one on the console


@dataclass
class RunConfig:
    name: str = "???"  # of the run
    run_dir: str = "runs/${name}"  # checkpoints, log, export and report
    target: TargetConfig = field(default_factory=TargetConfig)
    head: dict[str, Any] = field(default_factory=dict)  # _target_: heads.<file>.<Class> and its keyword arguments
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    zero: dict[str, Any] = field(default_factory=dict)  # DeepSpeed's zero_optimization section
    export: ExportConfig = field(default_factory=ExportConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    dry_run: bool = False  # launch/train.py and launch/run.py: print the plan and stop

    @property
    def eval_folder(self) -> str:
        """Of the report, in the run folder. Those of prompt sets alone and of sampled answers lie beside the run's own."""
        sampled = [f"t{self.eval.temperature:g}"] if self.eval.temperature else []
        return "-".join(["eval", *measured_only(self.data.prompts), *sampled])


def main(run: Callable[[RunConfig], object], *sections: str) -> None:
    """The command line of a launch script: composes the config and calls `run`. sections: of the config that the script reads, for
    --help; none: all."""

    argv = sys.argv[1:]
    remember(argv)
    if not {"-h", "--help"} & set(argv):
        return guard(lambda: run(load(argv)))
    from train.usage import usage  # which reads this file

    guard(lambda: print(usage(run.__globals__["__doc__"], sections)))


def guard(go: Callable[[], object]) -> None:
    """Calls `go`; what a user can mend ends with one line and status 2, Ctrl-C and a pipe that nobody reads as signals do."""
    try:
        go()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python says so once more at its end
        sys.exit(141)  # 128 + SIGPIPE
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal and launch/run.py may each send one
        print("stopped; the same command goes on from what is done", file=sys.stderr, flush=True)
        sys.exit(130)  # 128 + SIGINT
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in PATH_ERRORS:
            raise
        rank = int(os.environ.get("RANK", "0"))
        if rank:  # what all ranks run into is rank 0's to say, and torchrun ends the others at once; what is left is this rank's own
            time.sleep(3)
        text = _of_path(error) if isinstance(error, OSError) else error
        print(f"error: {f'[rank {rank}] ' if rank else ''}{text}", file=sys.stderr, flush=True)
        sys.exit(2)


def _of_path(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; a run writes to run_dir, data.store and data.responses: set them to folders with space that you own"


def choices(group: str, conf_dir: Path = CONF) -> list[str]:
    return sorted(path.stem for path in (conf_dir / group).glob("*.yaml"))


def load(argv: list[str], conf_dir: Path = CONF) -> RunConfig:
    """Composes conf_dir/config.yaml with the overrides in `argv` into checked dataclasses. Writes no file and no folder.

    Folders that a run writes or reads (run_dir, data.responses, data.store, train.init, eval.draft_model, those in eval.methods) come
    back absolute. Raises UserError: no or unknown conf, unknown key, bad value.
    """
    check_words(argv, choices("conf", conf_dir))
    try:
        run = OmegaConf.to_object(_compose(argv, conf_dir))
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: Hydra's own for head=null
        raise UserError(_explain(error, argv, conf_dir)) from error
    except YAMLError as error:
        raise UserError(f"a file under conf/ is no valid YAML: {' '.join(str(error).split())}") from error
    assert isinstance(run, RunConfig), "conf/config.yaml must list `schema` first in its defaults"
    for section, key in ((run, "run_dir"), (run.data, "responses"), (run.data, "store"), (run.train, "init"), (run.eval, "draft_model")):
        path = getattr(section, key)
        setattr(section, key, path and str(ROOT / Path(path).expanduser()))
    run.eval.methods = [str(ROOT / Path(method).expanduser()) if "/" in method else method for method in run.eval.methods]
    for section in (run.target, run.train):
        section.dtype = dist.usual_dtype() if section.dtype == "auto" else section.dtype
    checks.check(run, ROOT)
    return run


def _compose(overrides: list[str], conf_dir: Path) -> DictConfig:
    ConfigStore.instance().store(name="schema", node=RunConfig)
    with initialize_config_dir(str(conf_dir), version_base="1.3"):
        return compose("config", overrides=overrides)


def _explain(error: Exception, argv: list[str], conf_dir: Path) -> str:
    """One sentence for what Hydra or OmegaConf raised: the key, what is wrong with it, and what it could be."""
    text = f"{error}\n{error.__cause__ or ''}"
    if lost := re.search(r"Could not find '([^'/]+)/([^']+)'", text):
        group, choice = lost.groups()
        return f"{group}={choice} does not exist (conf/{group}/{choice}.yaml); one of: {', '.join(choices(group, conf_dir))}"
    key = found[1] if (found := re.search(r"full_key: (\S+)", text)) else ""
    place = f"conf/{in_file[1]}.yaml: " if (in_file := re.search(r"In '([^']+)': \w+ raised", text)) else ""
    if "missing mandatory value" in text:
        return f"{key} has no value; set it in the conf or as {key}=<value>"
    if re.search(r"not in struct|Key '.*' not in|Could not override", text):
        key = key or next((word.split("=")[0] for word in argv if word.split("=")[0] in text), "")
        section = key.rpartition(".")[0]
        known = _known_keys(section, [word for word in argv if word.split("=")[0].lstrip("+~") != key], conf_dir)
        return f"{place}unknown key {key}; {f'section {section}' if section else 'the top level'} knows: {', '.join(known)}"
    if "is not a ListConfig" in text:
        given = next((word.split("=", 1)[1] for word in argv if word.split("=")[0] == key), "...")
        return f"{place}{key} is a list: {key}=[{given}]"
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("In '")]
    reason = str(error.__cause__ or lines[0]).splitlines()[0]
    return f"{place}{key}: {reason}" if key else f"{place}{reason} (given: {' '.join(argv)})"


def _known_keys(section: str, argv: list[str], conf_dir: Path) -> list[str]:
    """The keys of a section; of an untyped one (head, zero) those that the conf gives it."""
    schema = OmegaConf.structured(RunConfig)
    node = OmegaConf.select(schema, section) if section else schema
    if not node:
        try:
            node = OmegaConf.select(_compose(argv, conf_dir), section)
        except (HydraException, OmegaConfBaseException):  # the conf is wrong in another place too
            node = None
    return sorted(str(k) for k in node) if isinstance(node, DictConfig) else []


def to_yaml(run: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(run)))
