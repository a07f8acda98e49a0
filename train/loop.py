"""The training loop: one for every head. A step is a pure function of the config, the step's number and the state before it.

Shape suffixes: K depths.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.batch import Batches
from data.commands import command
from data.errors import UserError
from heads.base import Batch, DraftHead
from train import checkpoint, dist
from train.config import RunConfig
from train.engine import Engine
from train.log import Clock, Log, Meter, chain_summary, summary
from train.optim import lr_at

# What an offline chain counts on this rank with the weights of now, on (device, dtype): [1 + k], as train.log.chain_summary reads it.
Walk = Callable[[torch.device, torch.dtype], Tensor]


def fit(cfg: RunConfig, engine: Engine, batches: Batches, heldout: Batches, walk: Walk | None = None) -> dict[str, Any]:
    """Trains from the latest checkpoint in cfg.run_dir, or from the start, to cfg.train.steps. Returns the last held-out record. walk: on
    every rank, or on none.

    Raises UserError where the loss or its gradient is not finite, before that step changes anything.
    """
    every, run_dir = cfg.train, Path(cfg.run_dir)
    data = batches.store.contents()
    first = checkpoint.resume(run_dir, engine, cfg, data)
    batches.saved(first, every.steps, every.accum)
    checkpoint.write_provenance(run_dir, cfg, first, batches.store.manifest["target"])
    last_val: dict[str, Any] = {}
    meter, clock = Meter(), Clock(first, every.steps)
    with Log(cfg, first) as log, closing(batches.prefetch(first, every.steps, every.accum)) as stream:
        if first:
            log.say(f"going on after step {first} of {run_dir}" if first < every.steps else f"all {first} steps are done: {run_dir}")
        for step, micros in enumerate(stream, start=first):
            take_step(cfg, engine, step, micros, batches, meter)
            clock.tokens += batches.tokens(step, every.accum)

            # ---- once in a while; `done` counts finished steps
            done = step + 1
            log.step(done)
            if (done % every.log_every == 0 or done == every.steps) and meter.pairs:
                record = summary(meter.means(), engine.head.depth_weights)
                record |= {"lr": lr_at(step, every.steps, cfg.optim), "grad_norm": float(engine.grad_norm)}
                log.write("train", done, record | clock.read(done, batches.waited))
            if done % every.val_every == 0 or done == every.steps:
                last_val = validate(cfg, engine, heldout, walk, like=micros[0])
                log.write("val", done, last_val)
            if done % every.save_every == 0 or done == every.steps:
                log.say(f"saved {checkpoint.save(run_dir, done, engine, cfg, data)}")
                batches.saved(done, every.steps, every.accum)
    return last_val


def take_step(cfg: RunConfig, engine: Engine, step: int, micros: list[Batch], batches: Batches, meter: Meter) -> None:
    """One optimizer step over this rank's micro-batches."""
    total_K = dist.all_sum(torch.stack([engine.head.count(batch) for batch in micros]).sum(dim=0))
    if not total_K.any():  # nothing supervised on any rank: no loss, no step
        return
    engine.set_lr(lr_at(step, cfg.train.steps, cfg.optim))
    for m, batch in enumerate(micros):
        seed_of(cfg.train.seed, step, m * dist.world() + dist.rank())
        try:
            meter.add(engine.backward(batch, total_K))
        except RuntimeError as error:  # a CPU that runs out of memory has no error of its own
            if not (isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)):
                raise
            raise UserError(_out_of_memory(cfg, engine.head, step, len(batch.token_ids_T))) from error
    if engine.skipped:
        ids = batches.sequences(step, cfg.train.accum)
        shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        raise UserError(
            f"step {step + 1}: the loss or its gradient is not finite; the step was not taken. It read {shown} of {batches.store.folder}. "
            "Lower optim.lr or optim.clip, or look at these sequences; the last checkpoint is intact"
        )


def _out_of_memory(cfg: RunConfig, head: DraftHead, step: int, tokens: int) -> str:
    half = (cfg.train.micro_tokens + 1) // 2
    again = "train.recompute=true changes no number and keeps far less. " if head.recompute is False else ""
    return (
        f"step {step + 1}: out of memory at a batch of {tokens} tokens. {again}Half as many, twice as often, makes nearly the same step: "
        f"train.micro_tokens={half} train.accum={2 * cfg.train.accum}, under another name or run_dir; "
        f"`{command('plan')}` says what takes how much"
    )


def seed_of(seed: int, step: int, micro: int) -> None:
    """Seeds the random numbers of one micro-batch (numbered over all ranks): they are the same after a resume, and for any split."""
    mixed = random.Random(f"{seed}/{step}/{micro}").getrandbits(63)
    torch.manual_seed(mixed)


@torch.no_grad()
def validate(cfg: RunConfig, engine: Engine, heldout: Batches, walk: Walk | None, like: Batch) -> dict[str, Any]:
    """The held-out store through the head once: pooled loss, `hit` and `accept` per depth, acceptance length; and what the chain accepts.

    `like`: any batch; it tells a rank that has no held-out batch which sums the others bring.
    """
    meter = Meter()
    with engine.evaluation():
        seed_of(cfg.train.seed, 0, 0)
        for batch in heldout.validation():
            meter.add(engine.head.loss(batch.to(engine.device, engine.dtype)))
        empty = None if meter.pairs else engine.head.loss(like.to(engine.device, engine.dtype))
        walked = walk(engine.device, engine.dtype) if walk else None
    record = summary(meter.means(empty), engine.head.depth_weights)
    return record if walked is None else record | chain_summary(dist.all_sum(walked))
