"""The capture of a run: both splits whole, or that of the training as a window, in the order in which it reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.answers import runs, say_others
from data.batch import POLL_SECONDS, Batches
from data.engine import capture, engine_identity, prefill
from data.errors import UserError
from data.files import bytes_text
from data.identity import asks, check_responses, identity
from data.lock import alone
from data.manifest import as_stored, check_free, free_bytes
from data.online import Answers
from data.part import WHOLE, Part
from data.teacher import kept_for
from data.window import Sizes, Waiting, WindowWriter, order_of, read_id, read_progress

if TYPE_CHECKING:
    from heads.base import DraftHead
    from train.config import RunConfig

PART_TOKENS = 2**25  # of one start of the engine: so many are listed in a file first

# Runs {id, token_ids, spans} through the target; the states go to a WindowWriter in a store of this folder, manifest and sizes.
Prefill = Callable[[list[dict[str, Any]], Path, dict[str, Any], Sizes], object]


def capture_run(cfg: RunConfig, head: DraftHead, target_dir: Path, sizes: Sizes | None, part: Part = WHOLE) -> None:
    """The states that `head` reads of the answers of both splits. sizes: of the window for the training, or None. part: this engine's, of
    several. UserError: no answers of this target, several engines for a window, and what data.engine.capture and capture_window refuse."""
    if part.name and sizes:
        raise UserError(f"data.window_gb: the states of a window come from one engine, and this is one of {part.count}: start one alone")
    store, maker = Path(cfg.data.store), identity(target_dir, cfg.target)
    answers = {split: Path(cfg.data.responses) / f"{split}.jsonl" for split in ("train", "heldout")}
    for split, path in answers.items():
        check_responses(path, maker, asks(cfg.data, split))
    taps, last = tuple(sorted(set(head.taps))), kept_for(head.needs_last, cfg.data.teacher)
    manifest = {**maker, "taps": list(taps), "hidden_size": head.target.hidden_size, "last": last, "dtype": cfg.data.states_dtype}
    manifest |= {"engine": engine_identity()}
    settings = {"target_dir": target_dir, "target_cfg": cfg.target, "max_length": cfg.data.max_length}
    settings |= {"cap_gb": cfg.data.max_store_gb, "part": part}
    with alone(store, "data.store", part):
        for split in cfg.data.whole_splits:
            whole = as_stored(store / split, manifest)
            reads = {"taps": tuple(whole["taps"]), "last": whole["last"]}
            capture(responses=answers[split], store_dir=store / split, manifest=whole, **reads, **settings)
        if sizes is None:
            return

        def run(todo: list[dict[str, Any]], store_dir: Path, manifest: dict[str, Any], sizes: Sizes) -> None:
            plan = {"store_dir": str(store_dir.absolute()), "manifest": manifest, "taps": list(taps), "last": last}
            prefill(target_dir, cfg.target, todo, {**plan, "shard_tokens": sizes.shard, "window": asdict(sizes)}, sizes.in_flight)

        read = Answers(answers["train"], cfg.data.max_length, None, "none", maker)
        order = {"seed": cfg.train.seed, "micro_tokens": cfg.train.micro_tokens, "max_length": cfg.data.max_length}
        capture_window(read, store / "train", manifest, sizes, run, **order)


def capture_window(  # noqa: PLR0913
    answers: Answers, store_dir: Path, manifest: dict[str, Any], sizes: Sizes, run: Prefill, *, seed: int, micro_tokens: int,
    max_length: int,
) -> None:  # fmt: skip
    """Captures what the training will read and deletes what it is past, until it ends. manifest: the identity of the capture.

    UserError: the disk cannot hold the window, or what is in the folder is not this window.
    """
    batches = Batches(answers, (), micro_tokens, seed, 0, 1, max_length)
    manifest = {**manifest, "window": order_of(answers, seed, micro_tokens, max_length)}
    have, free = sum(path.stat().st_size for path in store_dir.glob("shard-*.safetensors")), free_bytes(store_dir)
    say_others(answers.others, answers.folder)
    print(f"capture: a window of {bytes_text(sizes.window)}, {sizes.token:,} bytes a token at most -> {store_dir}", flush=True)
    whole = bytes_text(float(answers.lengths.sum()) * sizes.token)
    print(f"capture: each epoch {whole}, captured anew; {bytes_text(free)} of the disk are free", flush=True)
    check_free(store_dir, int(sizes.window) - have)
    WindowWriter(store_dir, manifest)  # refuses another window, before anybody waits
    waiting = Waiting(lambda text: print(f"capture: {text}", flush=True))
    at, end = _wait_for_training(store_dir, waiting)
    WindowWriter(store_dir, manifest).begin_at(read_id(micro, answers.ids[i]) for micro, i in batches.reads(at, min(at + 1, end)))
    for part in _parts(batches, at, end):
        done = WindowWriter(store_dir, manifest).done
        wanted = [(read_id(micro, answers.ids[i]), i) for micro, i in part]
        todo = [_item(answers, name, i) for name, i in wanted if name not in done]
        if todo:
            run(todo, store_dir, manifest, sizes)
    print(f"capture: everything up to the end of the training ({end} micro-batches) is captured", flush=True)
    writer = WindowWriter(store_dir, manifest)
    while writer.drop_past():
        waiting.on("it has not read all of it", store_dir / "reader", "train")
        time.sleep(POLL_SECONDS)
    writer.close()


def _wait_for_training(store_dir: Path, waiting: Waiting) -> tuple[int, int]:
    while (progress := read_progress(store_dir)) is None:
        waiting.on("it says which states it needs", store_dir / "reader", "train")
        time.sleep(POLL_SECONDS)
    waiting.over()
    return progress


def _parts(batches: Batches, first: int, end: int) -> Iterator[list[tuple[int, int]]]:
    part, tokens = [], 0
    for micro, i in batches.reads(first, end):
        part.append((micro, i))
        tokens += int(batches.lengths[i])
        if tokens >= PART_TOKENS:
            yield part
            part, tokens = [], 0
    if part:
        yield part


def _item(answers: Answers, name: str, i: int) -> dict[str, Any]:
    ids_T, mask_T = answers.tokens(i)
    return {"id": name, "token_ids": ids_T.tolist(), "spans": runs(mask_T.tolist())}
