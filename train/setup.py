"""From files to what the loop takes: stores that fit the run, or the target itself, batches, and a head with its frozen parts."""

from __future__ import annotations

from pathlib import Path

import torch

from data.batch import Batches
from data.errors import UserError
from data.forward import Forward
from data.identity import asks, check_responses, identity, template_hash, tokenizer_hash
from data.online import Answers
from data.sequences import Sequences
from data.store import Store, check_compatible
from data.target import fingerprint, frozen, spec, tensors
from data.vocab import count_supervised, coverage, draft_vocab
from data.window import Window
from heads import build
from heads.base import DraftHead
from train import checkpoint, dist, inputs, plan
from train.config import RunConfig


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
    check_compatible(
        store.manifest,
        fingerprint=fingerprint(target_dir),
        taps=head.taps,
        needs_last=head.needs_last,
        tokenizer_hash=tokenizer_hash(target_dir),
        template_hash=template_hash(target_dir),
    )
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
        reads = {"taps": head.taps, "last": head.needs_last, "say": say, "leader": dist.rank() == 0}
        window = Window(paths[0], cfg.data.max_length, maker, **place, **reads)
        return [window, open_store(cfg, head, target_dir, "heldout")]
    if plan.runs_target(cfg, head):
        say(f"data.states=online: {target_dir} in {cfg.target.dtype} on each rank; no states are stored")
        taps = tuple(sorted(set(head.taps)))
        forward = Forward(target_dir, taps, getattr(torch, cfg.target.dtype), dist.device(), cfg.target.trust_remote_code)
    return [Answers(path, cfg.data.max_length, forward, head.needs_last, maker) for path in paths]


def open_batches(cfg: RunConfig, head: DraftHead, store: Sequences) -> Batches:
    train = cfg.train
    share = train.sequence_parallel
    if dist.world() % share:
        raise UserError(f"train.sequence_parallel={share}: the {dist.world()} ranks do not fall into groups of {share}")
    if share > 1 and head.contiguous:
        raise UserError(f"train.sequence_parallel={share}: this head draws its blocks over whole documents; leave it at 1")
    found = Batches(store, head.taps, train.micro_tokens, train.seed, dist.rank(), dist.world(), cfg.data.max_length, share)
    say(f"{store.folder.stem}: {len(store)} sequences, {store.manifest['supervised_tokens']:,} supervised tokens")
    if found.cut or found.skipped:
        say(f"  data.max_length={cfg.data.max_length}: {found.cut} cut, {found.skipped} left out for want of a supervised token")
    return found


def equip(cfg: RunConfig, head: DraftHead, target_dir: Path, store: Sequences) -> None:
    """Moves the head to its device and gives it its draft vocabulary, the target's frozen parts, and its first weights."""
    head.to(dist.device())
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
        return checkpoint.load_head(saved)["draft_ids_U"]
    ids_U = torch.zeros(head.draft_vocab_size, dtype=torch.int64)
    if dist.rank() == 0:
        counts_V = count_supervised(store, head.target.vocab_size)
        ids_U = draft_vocab(counts_V, head.draft_vocab_size)
        say(f"draft vocabulary: {len(ids_U):,} of {len(counts_V):,} tokens, {coverage(counts_V, ids_U):.2%} of the supervised ones")
    return dist.broadcast(ids_U)


def _init_step(cfg: RunConfig) -> Path | None:
    """The checkpoint that train.init names: a step folder, or the latest of a run."""
    if cfg.train.init is None:
        return None
    folder = Path(cfg.train.init)
    step = folder if (folder / "state.json").is_file() else checkpoint.latest(folder)
    if step is None:
        raise UserError(f"train.init={folder}: no run with a checkpoint, nor a step folder of one")
    return step


def _load(head: DraftHead, step: Path) -> None:
    try:
        head.load_state_dict(checkpoint.load_head(step))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"train.init={step}: its weights do not fit this head section ({reason})") from error
    say(f"weights of {step}")


def say(text: str) -> None:
    if dist.rank() == 0:
        print(text, flush=True)
