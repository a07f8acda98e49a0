"""Answers, configs and runs for the tests of states that are worked out or captured while a training runs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data.capture
import data.engine
from data.answers import mask_of, write_asked
from data.forward import Forward
from data.identity import asks, identity
from data.online import Answers
from data.part import WHOLE, Part
from data.states import label_rows
from data.store import StoreWriter
from data.target import frozen, spec
from data.teacher import likeliest, top_k
from data.window import Sizes, Window, WindowWriter
from eval.chain import while_training
from heads import build
from train import checkpoint, dist, inputs, plan, setup
from train.config import RunConfig, load
from train.engine import Engine
from train.loop import fit

LONGEST = 40


def make_answers(target: Path, folder: Path) -> Path:
    """Answers of the target's maker: one that is cut, and one without a supervised token within the limit."""
    maker = identity(target, load(["conf=tiny_eagle3", f"target.model={target}"]).target)
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 14), ("heldout", 4)):
        lengths = [(3 + i % 5, 8 + (7 * i) % 20) for i in range(count)] + [(10, 60), (45, 5)]
        with (folder / f"{split}.jsonl").open("w") as f:
            for i, (prompt, response) in enumerate(lengths):
                ids = torch.randint(3, 500, (prompt + response,), generator=generator).tolist()
                answer = {"id": f"{split}{i}#0", "prompt_ids": ids[:prompt], "response_ids": ids[prompt:], "finish_reason": "stop"}
                f.write(json.dumps(answer) + "\n")
        (folder / f"{split}.meta.json").write_text(json.dumps(maker))
        write_asked(folder / f"{split}.jsonl", asks(load(["conf=tiny_eagle3"]).data, split), [f"{split}{i}#0" for i in range(len(lengths))])
    return folder


def config(target: Path, made: Path, run_dir: Path, *words: str, conf: str = "tiny_eagle3") -> RunConfig:
    steps = "train.steps=6 train.micro_tokens=60 train.save_every=3 train.val_every=6 train.log_every=1 train.threads=1".split()
    places = [f"target.model={target}", "target.spec={}", f"data.responses={made}", f"data.store={made}/store-{conf}", f"run_dir={run_dir}"]
    return load([f"conf={conf}", f"data.max_length={LONGEST}", *places, *steps, *words])


def kept_of(target: Path, last: str, mask_T: torch.Tensor, last_TD: torch.Tensor) -> dict[str, Any]:
    """What StoreWriter.add takes of these states."""
    if (k := top_k(last)) is None:
        return {"last_TD": last_TD if last != "none" else None}
    return {"top": likeliest(last_TD[label_rows(mask_T)], frozen(target, torch.float32, "cpu").lm_head_VD, k)}


def write_store(cfg: RunConfig, target: Path, last: str, taps: tuple[int, ...]) -> None:
    """What a capture of the same answers leaves, in their order."""
    forward, maker = Forward(target, taps, torch.float32, "cpu"), identity(target, cfg.target)
    about = {"taps": list(taps), "hidden_size": 64, "last": last, "dtype": "float32", "engine": {"name": "t", "version": "0"}}
    for split in inputs.SPLITS:
        answers = Answers(Path(cfg.data.responses) / f"{split}.jsonl", cfg.data.max_length, None, "none", maker)
        with StoreWriter(Path(cfg.data.store) / split, {**maker, **about}, shard_tokens=100) as writer:
            for i, name in enumerate(answers.ids):
                ids_T, mask_T = answers.tokens(i)
                taps_TLD, last_TD = forward.states(ids_T)
                writer.add(name, ids_T, mask_T, taps_TLD if taps else None, **kept_of(target, last, mask_T, last_TD))


def prefill(target_dir: Path, _cfg: Any, todo: list[dict[str, Any]], job: dict[str, Any], _in_flight: int) -> float:
    """data.engine.prefill without an engine: transformers' states, one sequence after the other."""
    forward = Forward(target_dir, job["taps"], torch.float32, "cpu")
    sizes = Sizes(**job["window"]) if "window" in job else None
    kind = WindowWriter if sizes else StoreWriter
    with kind(Path(job["store_dir"]), job["manifest"], job["shard_tokens"]) as writer:
        for item in todo:
            while isinstance(writer, WindowWriter) and sizes and not writer.has_room(sizes):
                time.sleep(0.02)
            ids_T = torch.tensor(item["token_ids"])
            taps_TLD, last_TD = forward.states(ids_T)
            mask_T = torch.tensor(mask_of(item["spans"], len(ids_T)))
            writer.add(item["id"], ids_T, mask_T, taps_TLD if job["taps"] else None, **kept_of(target_dir, job["last"], mask_T, last_TD))
    return 1.0


def capture(cfg: RunConfig, target: Path, part: Part = WHOLE) -> None:
    """launch/capture.py in this process, with the `prefill` above in the place of the engine's."""
    head = build(cfg.head, spec(target))
    data.capture.capture_run(cfg, head, target, plan.window_sizes(cfg, head), part)


def main() -> None:
    """python tests/live.py capture|train <target> <answers> <run_dir> [words]: in a process that can be killed."""
    what, target, made, run_dir, *words = sys.argv[1:]
    torch.set_num_threads(1)
    data.capture.prefill = data.engine.prefill = prefill
    cfg = config(Path(target), Path(made), Path(run_dir), *words)
    if what == "capture":
        capture(cfg, Path(target))
    else:
        inputs.require_inputs(cfg)
        train(cfg, Path(target), pause=0.1)
        dist.stop()


def train(cfg: RunConfig, target: Path, stop_before: int | None = None, pause: float = 0.0) -> dict[str, torch.Tensor]:
    """launch/train.py in this process. stop_before: the data of that step ends the run, as a crash does. pause: seconds before each step.
    Returns the head."""
    dist.start(1)
    torch.manual_seed(cfg.train.seed)
    head = build(cfg.head, spec(target))
    store, heldout = setup.open_states(cfg, head, target)
    held = [store.lock] if isinstance(store, Window) and store.lock else []
    setup.equip(cfg, head, target, store)
    batches = setup.open_batches(cfg, head, store)
    whole = batches.step

    def step(i: int, accum: int) -> list[Any]:
        if i == stop_before:
            raise RuntimeError("the machine went away")
        time.sleep(pause)
        return whole(i, accum)

    batches.step = step
    try:
        walk = while_training(cfg, head, heldout, dist.rank(), dist.world())
        fit(cfg, Engine(head, cfg), batches, setup.open_batches(cfg, head, heldout), walk)
    finally:
        for lock in held:  # as the end of the process would
            lock.close()
    return checkpoint.load_head(Path(cfg.run_dir) / f"step-{cfg.train.steps:06d}")


if __name__ == "__main__":
    main()
