"""What the stages of a run read, which of it is still to be made, and by which commands."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from data.commands import command
from data.errors import UserError
from data.lock import held
from data.target import fingerprint, local_folder
from data.window import Waiting
from train import dist
from train.config import ROOT, RunConfig

SPLITS = ("train", "heldout")


def stages(cfg: RunConfig) -> tuple[str, ...]:
    """What launch/run.py runs, one after the other. UserError: some would have to run side by side."""
    if cfg.data.window_gb is not None and not cfg.dry_run:
        raise UserError(
            f"data.window_gb: capture and training run side by side, so start each by itself: `{command('respond')}`, then "
            f"`{command('capture')}` and, beside it, `{command('train')}`, then `{command('export')}` and `{command('evaluate')}`"
        )
    return () if cfg.dry_run else ("respond", "capture", "train", "export", "evaluate")


def closed_manifest(cfg: RunConfig, split: str) -> dict[str, Any] | None:
    """The manifest of a finished store, else None; what is wrong with a broken one is for the stage that opens it to say."""
    manifest = _read(Path(cfg.data.store) / split / "manifest.json")
    return manifest if manifest and manifest.get("closed") and "tokens" in manifest else None


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def of_this_target(cfg: RunConfig, about: dict[str, Any] | None) -> bool:
    """Whether a store or answers that say this of their maker are the target's: by fingerprint where its own folder is at hand, else by
    name. What says nothing is taken to be."""
    there = (about or {}).get("target")
    if not isinstance(there, dict):
        return True
    folder = local_folder(cfg.target, ROOT)
    return there.get("fingerprint") == fingerprint(folder) if folder else there.get("id") == cfg.target.model


def answers_meta(cfg: RunConfig, split: str) -> dict[str, Any] | None:
    """What made the answers of a split; None where that cannot be read."""
    return _read(Path(cfg.data.responses) / f"{split}.meta.json")


def strangers(cfg: RunConfig) -> list[str]:
    """What lies where this run reads, and is another target's."""
    found = [f"data.store={cfg.data.store}" for split in cfg.data.whole_splits if not of_this_target(cfg, closed_manifest(cfg, split))]
    found += [f"data.responses={cfg.data.responses}" for split in SPLITS if not of_this_target(cfg, answers_meta(cfg, split))]
    return list(dict.fromkeys(found))


def missing_inputs(cfg: RunConfig) -> list[str]:
    if cfg.data.states == "online":
        return [f"{path} (answers)" for path in answer_files(cfg) if not path.is_file()]
    if cfg.data.window_gb is not None and not answer_files(cfg)[0].is_file():
        return [f"{answer_files(cfg)[0]} (answers)"]
    return [f"{cfg.data.store}/{split} (hidden states)" for split in cfg.data.whole_splits if closed_manifest(cfg, split) is None]


def next_commands(cfg: RunConfig) -> list[str]:
    """The commands that make what is missing, in order."""
    stages = ["capture"] if cfg.data.states == "store" else []
    if not all(path.is_file() for path in answer_files(cfg)):
        stages.insert(0, "respond")
    return [command(stage) for stage in stages]


def answer_files(cfg: RunConfig) -> list[Path]:
    return [Path(cfg.data.responses) / f"{split}.jsonl" for split in SPLITS]


def require_inputs(cfg: RunConfig) -> None:
    """Refuses to train without the hidden states, or what they are worked out from, naming the commands that make them."""
    waiting = Waiting(lambda text: print(text, flush=True) if dist.rank() == 0 else None)
    while cfg.data.window_gb is not None and missing_inputs(cfg) and held(Path(cfg.data.store)):
        waiting.on("the held-out states come first", Path(cfg.data.store), "capture")
        time.sleep(1)
    missing = missing_inputs(cfg)
    if missing:
        raise UserError(f"missing: {', '.join(missing)}. Make it with: {' && '.join(next_commands(cfg))}")
