"""From files to what the loop takes: stores that fit the run, or the target itself, batches, and a head with its frozen parts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from data.batch import Batches
from data.errors import UserError
from data.files import read_object
from data.forward import Forward
from data.identity import asks, check_responses, identity, read_asked
from data.manifest import check_asked
from data.online import Answers
from data.sequences import Sequences
from data.store import Store, check_compatible
from data.target import frozen, spec, tensors
from data.teacher import kept_for
from data.vocab import count_supervised, coverage, draft_vocab
from data.window import Window
from heads import build
from heads.base import DraftHead
from heads.kernels import compile_passes
from train import checkpoint, dist, inputs, plan
from train.config import RunConfig

PUBLISHED = "model.safetensors"


def first_head(cfg: RunConfig, target_dir: Path) -> DraftHead:
    """The head with the weights that the seed gives it."""
    torch.manual_seed(cfg.train.seed)
    return build(cfg.head, spec(target_dir))


def open_store(cfg: RunConfig, head: DraftHead, target_dir: Path, split: str) -> Store:
    """The hidden states of a split. Raises UserError where there are none, or those of another target, tokenizer,
    chat template or set of taps."""
    store = Store(Path(cfg.data.store) / split)
    if "window" in store.manifest:
        raise UserError(
            f"{store.folder}: holds a window of states; set data.window_gb as its capture has it, or data.store to another folder"
        )
    maker = identity(target_dir, cfg.target)
    check_compatible(
        store.manifest,
        fingerprint=maker["target"]["fingerprint"],
        taps=head.taps,
        needs_last=kept_for(head.needs_last, cfg.data.teacher),
        tokenizer_hash=maker["tokenizer_hash"],
        template_hash=maker["template_hash"],
    )
    answers = Path(cfg.data.responses) / f"{split}.jsonl"
    if (told := read_asked(answers)) is not None:  # a store may come without its answers
        check_responses(answers, maker, asks(cfg.data, split))
        check_asked(store.folder, store.ids, set(told["ids"]))
    return store


def open_states(cfg: RunConfig, head: DraftHead, target_dir: Path) -> list[Sequences]:
    """The training and the held-out sequences with their states, from where data.states says. UserError: as open_store, or no answers of
    this target, or no room for it beside the training."""
    if "train" in cfg.data.whole_splits:
        return [open_store(cfg, head, target_dir, split) for split in inputs.SPLITS]
    train = cfg.train
    maker, forward = identity(target_dir, cfg.target), None
    paths = [Path(cfg.data.responses) / f"{split}.jsonl" for split in inputs.SPLITS]
    for split, path in zip(inputs.SPLITS, paths, strict=True):
        check_responses(path, maker, asks(cfg.data, split))
    if cfg.data.window_gb is not None:
        plan.window_sizes(cfg, head, dist.world())
        place = {"folder": Path(cfg.data.store) / "train", "order": (train.seed, train.micro_tokens)}
        reads = {"taps": head.taps, "last": kept_for(head.needs_last, cfg.data.teacher), "say": say, "leader": dist.rank() == 0}
        window = Window(paths[0], cfg.data.max_length, maker, **place, **reads)
        return [window, open_store(cfg, head, target_dir, "heldout")]
    if plan.runs_target(cfg, head):
        say(f"data.states=online: {target_dir} in {cfg.target.dtype} on each rank; no states are stored")
        taps = tuple(sorted(set(head.taps)))
        forward = Forward(target_dir, taps, getattr(torch, cfg.target.dtype), dist.device(), cfg.target.trust_remote_code)
    return [Answers(path, cfg.data.max_length, forward, head.needs_last, maker, head.kv_layers) for path in paths]


def open_batches(cfg: RunConfig, head: DraftHead, store: Sequences) -> Batches:
    train = cfg.train
    share = train.sequence_parallel
    if dist.world() % share:
        raise UserError(f"train.sequence_parallel={share}: the {dist.world()} ranks do not fall into groups of {share}")
    if share > 1 and head.contiguous:
        raise UserError(f"train.sequence_parallel={share}: this head draws its blocks over whole documents; leave it at 1")
    found = Batches(store, head.taps, train.micro_tokens, train.seed, dist.rank(), dist.world(), cfg.data.max_length, share)
    say(f"{store.folder.stem}: {len(store)} sequences, {store.manifest['supervised_tokens']:,} supervised tokens")
    if (longer := found.lengths[found.lengths > train.micro_tokens]).size:
        say(f"  train.micro_tokens={train.micro_tokens}: {len(longer)} are longer, up to {longer.max()}, and each is a batch by itself")
    if found.cut or found.skipped:
        say(f"  data.max_length={cfg.data.max_length}: {found.cut} cut, {found.skipped} left out for want of a supervised token")
    return found


def equip(cfg: RunConfig, head: DraftHead, target_dir: Path, store: Sequences) -> None:
    """Moves the head to its device and gives it its draft vocabulary, the target's frozen parts, and its first weights."""
    head.to(dist.device())
    if cfg.train.recompute:
        head.recompute = True
    if cfg.train.compile:
        _check_compiler("CXX" if dist.device().type == "cpu" else "CC")  # Triton's launchers are C
    compile_passes(on=cfg.train.compile)
    if head.draft_vocab_size is not None:
        head.set_draft_vocab(_draft_ids(cfg, head, store))
    parts = frozen(target_dir, getattr(torch, cfg.train.dtype), dist.device())
    head.attach(parts)
    if checkpoint.latest(Path(cfg.run_dir)) is None:
        head.start_from(parts)
        own = tensors(target_dir, head.begins_as.values())
        head.load_state_dict({ours: own[theirs] for ours, theirs in head.begins_as.items()}, strict=False)
        if (init := _init_step(cfg)) is not None:
            _load(head, init)


def _draft_ids(cfg: RunConfig, head: DraftHead, store: Sequences) -> torch.Tensor:
    """The ids of the run's own checkpoint, or of the one it begins with; else the most frequent labels of the store, counted on rank 0."""
    assert head.draft_vocab_size is not None
    saved = checkpoint.latest(Path(cfg.run_dir)) or _init_step(cfg)
    if saved is not None:
        return _weights(head, saved)["draft_ids_U"]
    ids_U = torch.zeros(head.draft_vocab_size, dtype=torch.int64)
    if dist.rank() == 0:
        counts_V = count_supervised(store, head.target.vocab_size)
        ids_U = draft_vocab(counts_V, head.draft_vocab_size)
        say(f"draft vocabulary: {len(ids_U):,} of {len(counts_V):,} tokens, {coverage(counts_V, ids_U):.2%} of the supervised ones")
    return dist.broadcast(ids_U)


def _init_step(cfg: RunConfig) -> Path | None:
    """What train.init names: a step folder, the latest of a run, or a head as the engine loads it."""
    if cfg.train.init is None:
        return None
    folder = Path(cfg.train.init)
    step = folder if any((folder / name).is_file() for name in ("state.json", PUBLISHED)) else checkpoint.latest(folder)
    if step is None:
        raise UserError(f"train.init={folder}: no run with a checkpoint, nor a step folder of one, nor a published head ({PUBLISHED})")
    return step


def _load(head: DraftHead, step: Path) -> None:
    weights = _weights(head, step)
    try:
        head.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"train.init={step}: its weights do not fit this head section ({reason})") from error
    say(f"weights of {step}")


def _weights(head: DraftHead, step: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load_head(step) if (step / "state.json").is_file() else _published(head, step)


def _published(head: DraftHead, folder: Path) -> dict[str, torch.Tensor]:
    """The state_dict of a head in the engine's layout, be it an export or somebody else's. UserError: it is not this head."""
    if head.draft_vocab_size is not None:
        raise UserError(f"train.init={folder}: a published head gives no draft vocabulary; name a run, or set head.draft_vocab_size=null")
    export, said = head.export(), read_object(folder / "config.json", "it must be a head as the engine loads it")
    stored, names = load_file(folder / PUBLISHED), export.names
    faults = [f"{key} is {theirs} there and {ours} in this head section" for key, ours, theirs in _differences(export.config, said)]
    faults += [f"it has no {name}" for name in names.values() if name not in stored]
    faults += [f"this head has no {name}" for name in stored if name not in {*names.values(), *export.extra}]
    if faults:
        raise UserError(f"train.init={folder}: not this head: {'; '.join(faults[:4])}")
    return {ours: stored[theirs] for ours, theirs in names.items()}


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, ours, theirs) where two configs that both say something of a key differ."""
    found = []
    for key in ours.keys() & theirs.keys():
        a, b = ours[key], theirs[key]
        found += _differences(a, b) if isinstance(a, dict) and isinstance(b, dict) else [(key, a, b)] if a != b else []
    return sorted(found, key=lambda difference: difference[0])


def say(text: str) -> None:
    if dist.rank() == 0:
        print(text, flush=True)


def _check_compiler(variable: str) -> None:
    usual = {"CXX": ["g++"], "CC": ["gcc", "clang"]}[variable]
    names = [os.environ[variable]] if variable in os.environ else usual
    if not any(map(shutil.which, names)):
        what = f"there is no {' or '.join(names)} here; install {usual[0]}, name another in {variable}, or set it to false"
        raise UserError(f"train.compile=true: {what}")
