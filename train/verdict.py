"""Whether a planned run fits, what to change by how much where it does not, and how long its stages take: the plan in plain words."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from data.errors import UserError
from data.files import bytes_text
from data.manifest import as_stored, free_bytes, plan_bytes, stored_bytes
from data.teacher import kept_for
from heads.base import DraftHead, TargetSpec
from train.config import RunConfig
from train.devices import GPUS, Device
from train.inputs import SPLITS, answers_meta, closed_manifest, of_this_target, strangers
from train.plan import ITEMSIZE, Plan, build_on_meta, count_prompts, memory, store_size, window_sizes
from train.sizes import target_flops, target_parameters

USABLE = 0.9  # share of a memory: the rest is the allocator's, the runtime's and the communication's
ENGINE_USABLE, ENGINE_FIXED = 0.9, 4e9  # share that vLLM takes by itself, and its activations; what is left of it holds weights and cache
REACHED, READ = 0.4, 0.5  # shares of the peak of products, and of the bandwidth, that times are reckoned with
SMALLEST = 256  # train.micro_tokens below which no advice goes

FITS, UNSURE, NOT = "ok", "? ", "NO"
Judged = tuple[str, str]  # one of these, and why


def verdict(cfg: RunConfig, spec: TargetSpec, found: Plan, device: Device) -> list[str]:
    """Lines to print under the table."""
    head, others = build_on_meta(cfg, spec), strangers(cfg)
    judged = [_training(cfg, spec, head, found, device), _engine(cfg, spec, found, device), _disk(cfg, spec, head, found)]
    judged += [(NOT, f"{place} holds another target's: set it to another folder") for place in others]
    words = {NOT: f"it does not fit: change what {NOT} says", UNSURE: f"it may not fit: see {UNSURE.strip()}", FITS: "it fits"}
    worst = next(mark for mark in words if mark in {mark for mark, _ in judged})
    lines = [f"Verdict: {words[worst]}.", *(f"  {mark} {text}" for mark, text in judged)]
    return [*lines, "Time of each stage, a yardstick and no promise:", *(f"  {line}" for line in _times(cfg, spec, found, device, others))]


def _training(cfg: RunConfig, spec: TargetSpec, head: DraftHead, found: Plan, device: Device) -> Judged:
    ranks, share = found.world if device.shared else 1, cfg.train.sequence_parallel
    if found.world % share:
        fits = [n for n in range(1, found.world + 1) if found.world % n == 0]
        return NOT, f"training: train.sequence_parallel={share} does not divide the {found.world} ranks: set it to one of {_listed(fits)}"
    need, room = sum(found.memory.values()) * ranks, device.memory * USABLE
    text = f"training: {bytes_text(need)} {'in all' if device.shared else 'per GPU'}; {_memory_of(device, room)}"
    if need <= room:
        return FITS, text
    mend = _smaller(cfg, spec, head, found.world, room / ranks)
    others = [f"{gpu.name} ({bytes_text(gpu.memory)})" for gpu in GPUS.values() if need / ranks <= gpu.memory * USABLE]
    elsewhere = f"; as it is it fits {' or '.join(others)}" if others else ""
    return NOT, f"{text}: {bytes_text(need - room)} too much. {mend}{elsewhere}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _memory_of(device: Device, room: float) -> str:
    return f"{device.name} has {bytes_text(device.memory)}, {bytes_text(room)} of it usable"


def _smaller(cfg: RunConfig, spec: TargetSpec, head: DraftHead, world: int, room: float) -> str:
    """The first change that makes the training fit: ZeRO stages first, for they cost nothing but traffic, then smaller micro-batches, and
    shorter documents with them, for one over the budget is a batch by itself."""
    train, data, stage = cfg.train, cfg.data, int(cfg.zero["stage"])
    tokens, accum = train.micro_tokens, train.accum
    while tokens >= SMALLEST:
        length = data.max_length if tokens == train.micro_tokens else min(data.max_length, tokens)
        sizes = {"train": replace(train, micro_tokens=tokens), "data": replace(data, max_length=length)}
        for at in range(stage, 4 if world > 1 else stage + 1):
            size = sum(memory(replace(cfg, zero={**cfg.zero, "stage": at}, **sizes), head, spec, world).values())
            if size <= room:
                words = [f"zero=stage{at}"] * (at != stage)
                words += [f"train.micro_tokens={tokens} train.accum={accum}"] * (tokens != train.micro_tokens)
                words += [f"data.max_length={length}"] * (length != data.max_length)
                return f"It fits with {' '.join(words)} ({bytes_text(size)} a rank)"
        tokens, accum = tokens // 2, accum * 2
    return "No micro-batch is small enough: take a smaller head, more GPUs with zero=stage3, or a larger device"


def _engine(cfg: RunConfig, spec: TargetSpec, found: Plan, device: Device) -> Judged:
    """The target in vLLM, for answers, capture and evaluation."""
    weights, parallel = target_parameters(spec) * ITEMSIZE[cfg.target.dtype], cfg.target.tensor_parallel
    room = device.memory * ENGINE_USABLE - (0 if device.shared else ENGINE_FIXED)
    text = f"answers, capture, evaluation: the target's weights take {bytes_text(weights)}"
    if device.shared:
        return FITS if weights <= room else NOT, f"{text}; {_memory_of(device, room)}"
    text += f", {bytes_text(weights / parallel)} on each of target.tensor_parallel={parallel} GPUs; {_memory_of(device, room)}"
    if not _splits(spec, parallel):
        fits = [n for n in range(1, found.world + 1) if _splits(spec, n)]
        heads = f"{spec.num_heads} attention heads and {spec.num_kv_heads} of keys and values"
        return NOT, f"{text}. The target has {heads}: set it to one of {_listed(fits)}"
    if parallel > found.world:
        return NOT, f"{text}. There {'is' if found.world == 1 else 'are'} {found.world} (gpus={found.world})"
    if weights / parallel <= room:
        return FITS, text
    enough = [n for n in range(1, spec.num_heads + 1) if _splits(spec, n) and weights / n <= room]
    mend = f"target.tensor_parallel={enough[0]} is enough" if enough else "no number of them is enough"
    return NOT, f"{text}: {mend}"


def _splits(spec: TargetSpec, parallel: int) -> bool:
    """Whether vLLM spreads the target's heads over so many GPUs."""
    kv = spec.num_kv_heads
    return spec.num_heads % parallel == 0 and (kv % parallel == 0 or parallel % kv == 0)


def _disk(cfg: RunConfig, spec: TargetSpec, head: DraftHead, found: Plan) -> Judged:
    store, run_dir, cap = Path(cfg.data.store), Path(cfg.run_dir), cfg.data.max_store_gb * 1e9
    if found.store_bytes is None:
        return UNSURE, "disk: unknown, for nothing bounds the prompts: set data.limit and data.heldout_limit"
    there, whole = stored_bytes(store), found.store_bytes + _wider(cfg, spec, head, found)
    need = max(0, whole - there)
    saved = (cfg.train.keep + 1) * found.head_parameters * (16 + ITEMSIZE[cfg.train.dtype])  # weights, masters, two moments, export's copy
    free, free_run = free_bytes(store), free_bytes(run_dir)
    beside = saved if free == free_run else 0  # one disk for both
    at_most = "at most " * (found.tokens is not None and found.tokens.source == "bound")
    text = f"disk: {at_most}{bytes_text(need)} of states are still to be written to {store}, where {bytes_text(free)} are free, and "
    text += f"{bytes_text(saved)} of checkpoints to {run_dir}{'' if beside else f', where {bytes_text(free_run)} are free'}"
    if saved > free_run:
        return NOT, f"{text}. Set run_dir to another disk, or lower train.keep={cfg.train.keep}"
    if whole <= cap and need + beside <= free:
        return FITS, text
    room = min(cap, free + there - beside)
    why = f"over data.max_store_gb={cfg.data.max_store_gb:g}" if whole > cap else "more than is free"
    text = f"{text}: {why}. {_less_disk(cfg, spec, head, found, room)}"
    if at_most:
        text += ". Answers are shorter than that as a rule; the capture counts them, and refuses what is too much before it starts"
        return UNSURE, text
    return NOT, text


def _wider(cfg: RunConfig, spec: TargetSpec, head: DraftHead, found: Plan) -> int:
    """Bytes by which a store is larger than the head needs it, because it holds more taps or `last` already, with which its capture goes
    on. What is wrong with a broken one is for the capture to say."""
    if cfg.data.states == "online":
        return 0
    more, asked = 0, {"taps": sorted(set(head.taps)), "last": kept_for(head.needs_last, cfg.data.teacher)}
    for split, tokens in zip(SPLITS, (found.tokens, found.heldout), strict=True):
        if split in cfg.data.whole_splits and tokens is not None:
            with suppress(UserError):
                about = as_stored(Path(cfg.data.store) / split, asked)
                sizes = [(len(each["taps"]), spec.hidden_size, each["last"], cfg.data.states_dtype) for each in (about, asked)]
                stored, needed = (plan_bytes(tokens.total, tokens.supervised, *size) for size in sizes)
                more += stored - needed
    return more


def _less_disk(cfg: RunConfig, spec: TargetSpec, head: DraftHead, found: Plan, room: float) -> str:
    def sizes(cfg: RunConfig) -> tuple[int, int]:
        train, heldout = (store_size(cfg, head, spec, tokens) or 0 for tokens in (found.tokens, found.heldout))
        return train, heldout

    ways = []
    if cfg.data.states_dtype != "fp8" and head.taps:
        size = sum(sizes(replace(cfg, data=replace(cfg.data, states_dtype="fp8"))))
        ways.append(f"data.states_dtype=fp8 makes it {bytes_text(size)}{'' if size <= room else ', still too much'}")
    train, heldout = sizes(cfg)
    if train and (prompts := count_prompts(cfg, "train")) and (fewer := int(prompts * max(0, room - heldout) / train)):
        ways.append(f"data.limit={fewer} fits")
    if cfg.data.window_gb is None and heldout < room and (words := _window(cfg, head, found.world, room * USABLE)):
        ways.append(f"{words} keeps a window of it")
    if found.store_bytes and cfg.data.max_store_gb * 1e9 <= room:
        ways.append(f"data.max_store_gb={found.store_bytes / 1e9 * 1.05:.0f} allows it, where the disk has room")
    return "; or ".join(ways)


def _window(cfg: RunConfig, head: DraftHead, world: int, room: float) -> str:
    """The words that keep a window of the training's states in so many bytes: what lies between two checkpoints must fit in it."""
    data, every = replace(cfg.data, window_gb=round(room / 1e9, 3)), cfg.train.save_every
    while every:
        with suppress(UserError):
            window_sizes(replace(cfg, data=data, train=replace(cfg.train, save_every=every)), head, world)
            return f"data.window_gb={data.window_gb:g}" + f" train.save_every={every}" * (every < cfg.train.save_every)
        every //= 2
    return ""


def _times(cfg: RunConfig, spec: TargetSpec, found: Plan, device: Device, others: list[str]) -> list[str]:
    """One line a stage, with what it assumes. others: train.inputs.strangers."""
    engines, ranks = (1, 1) if device.shared else (cfg.target.tensor_parallel, found.world)
    most = "at most " if found.tokens and found.tokens.source == "bound" else ""
    product = f"{REACHED:.0%} of {_rate(device.flops)}FLOP/s"

    def line(stage: str, seconds: float, devices: int, how: str) -> str:
        bound = most if stage != "training" else ""
        return f"{stage}: {bound}{time_text(seconds / 3600)} on {device.name if device.shared else f'{devices} x {device.name}'}; {how}"

    if found.tokens is None or found.heldout is None:
        lines = ["answers, capture: unknown, for nothing bounds the prompts"]
    else:
        reads = f"each step of the engine reads weights and cache at {READ:.0%} of {_rate(device.bandwidth)}B/s"
        how = f"{product}, and {reads}, for data.batch_size={cfg.data.batch_size} answers at a time"
        lines = [line("answers", _answer_seconds(cfg, spec, found, device) / engines, engines, how)]
        if all(
            (Path(cfg.data.responses) / f"{split}.jsonl").is_file() and of_this_target(cfg, answers_meta(cfg, split)) for split in SPLITS
        ):
            lines = ["answers: some or all are there already"]
        elif cfg.data.server:
            lines = [f"answers: as long as {cfg.data.server} takes"]
        seconds = found.capture_flops / (engines * device.flops * REACHED)
        lines += [line("capture", seconds, engines, f"{product}; disk not counted") if seconds else "capture: runs no engine"]
        if cfg.data.window_gb is None and all(closed_manifest(cfg, split) for split in SPLITS) and not others:
            lines[-1] = "capture: there already"
    seconds = found.flops / (ranks * device.flops * REACHED)
    return [*lines, line("training", seconds, ranks, f"{product}; loading not counted")]


def _answer_seconds(cfg: RunConfig, spec: TargetSpec, found: Plan, device: Device) -> float:
    """On one device. Every token passes the target once; each step of the engine, which writes one token of every answer in flight, reads
    the weights and half an answer's cache for each."""
    assert found.tokens and found.heldout
    asked = [found.heldout] + ([found.tokens] if cfg.data.answers == "target" else [])
    written, total = sum(tokens.supervised for tokens in asked), sum(tokens.total for tokens in asked)
    length = min(cfg.data.max_length, cfg.target.max_model_len)
    products = target_flops(spec, length) * total + 2 * spec.hidden_size * spec.vocab_size * written
    size = ITEMSIZE[cfg.target.dtype]
    cache = cfg.data.batch_size * length / 2 * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * size
    read = written / cfg.data.batch_size * (target_parameters(spec) * size + cache)
    return products / (device.flops * REACHED) + read / (device.bandwidth * READ)


def _rate(value: float) -> str:
    return f"{value / 1e12:,.3g} T" if value >= 1e12 else f"{value / 1e9:,.3g} G"


def time_text(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{hours * 60:,.1f} min" if hours * 60 >= 1 else f"{hours * 3600:,.1f} s"
