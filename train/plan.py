"""What a run will take, before it takes it: parameters, memory per GPU, disk, steps; and which inputs are still to be made.

Needs no GPU, no weights and no network: the head is built on the `meta` device from the target's dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

import heads
from data.answers import spans_of
from data.errors import UserError
from data.files import bytes_text
from data.identity import asks, read_asked
from data.manifest import plan_bytes
from data.prompts import read_jsonl_tolerant, read_prompts, select
from data.selfprompt import split_sources
from data.teacher import kept_for, top_k
from data.window import Sizes
from heads.base import DraftHead, TargetSpec
from heads.block import BlockHead
from heads.chain import ChainHead
from heads.chunk import kept_depths
from heads.layers import Attention
from train.config import ROOT, RunConfig
from train.inputs import SPLITS, answers_meta, closed_manifest, of_this_target
from train.sizes import block_activations, frozen_parameters, head_activations, idle_parameters, target_flops, target_parameters

ITEMSIZE = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Tokens:
    """Tokens of the answers of one split. source: "store" (counted), "answers" (from their mean length) or "bound" (at most so many)."""

    total: int
    supervised: int
    source: str


@dataclass(frozen=True)
class Plan:
    """Bytes are per rank in `memory`, for all splits in `store_bytes`; tokens None: the conf does not bound the prompts."""

    name: str
    head: str
    head_parameters: int
    frozen_parameters: int
    world: int
    stage: int
    memory: dict[str, int]
    tokens: Tokens | None
    heldout: Tokens | None
    store_bytes: int | None
    max_store_gb: float
    window_gb: float | None
    states: str
    states_dtype: str
    teacher: str
    steps: int
    tokens_per_step: int  # at most; a document over train.micro_tokens is a batch by itself
    over_budget: bool  # there may be such
    flops: float
    capture_flops: float  # of what is captured in all; 0 where no states are stored


def plan(cfg: RunConfig, spec: TargetSpec, world: int) -> Plan:
    """The plan of `cfg` on `world` ranks. Raises UserError where the head's section does not build for this target."""
    head = build_on_meta(cfg, spec)
    counts = {split: count_tokens(cfg, split) for split in SPLITS}
    sizes = [store_size(cfg, head, spec, tokens) for tokens in counts.values()]
    if (window := window_sizes(cfg, head, world)) and sizes[0] is not None:
        sizes[0] = min(sizes[0], int(window.window))
    beside = target_flops(spec, cfg.data.max_length) * cfg.train.sequence_parallel if runs_target(cfg, head) else 0
    batch = longest_batch(cfg)
    per_step = batch * cfg.train.accum * world // cfg.train.sequence_parallel
    trained = sum(p.numel() for p in head.parameters())
    chosen = top_k(kept_for(head.needs_last, cfg.data.teacher)) is not None  # then the capture works out the teacher, of all tokens at most
    lm_head_flops, top_flops = (2 * spec.hidden_size * U * chosen for U in (spec.vocab_size, head.draft_vocab_size or spec.vocab_size))
    captured = 0
    if cfg.data.states == "store" and reads_states(head):
        captured = sum(tokens.total for tokens in counts.values() if tokens)
        if window and counts["train"]:  # anew for each epoch
            captured += cfg.train.steps * per_step - counts["train"].total
    return Plan(
        name=cfg.name,
        head=str(cfg.head["_target_"]).removeprefix("heads."),
        head_parameters=trained,
        frozen_parameters=frozen_parameters(spec),
        world=world,
        stage=int(cfg.zero["stage"]),
        memory=memory(cfg, head, spec, world),
        tokens=counts["train"],
        heldout=counts["heldout"],
        store_bytes=None if None in sizes else sum(size for size in sizes if size is not None),
        max_store_gb=cfg.data.max_store_gb,
        window_gb=cfg.data.window_gb,
        states=cfg.data.states,
        states_dtype=cfg.data.states_dtype,
        teacher=cfg.data.teacher,
        steps=cfg.train.steps,
        tokens_per_step=per_step,
        over_budget=batch > cfg.train.micro_tokens,
        flops=cfg.train.steps * per_step * (flops_per_token(head, spec, cfg.data.max_length, batch) - top_flops + beside),
        capture_flops=(target_flops(spec, cfg.data.max_length) + lm_head_flops) * captured,
    )


def build_on_meta(cfg: RunConfig, spec: TargetSpec) -> DraftHead:
    try:
        with torch.device("meta"):
            head = heads.build(cfg.head, spec)
            for k in cfg.eval.ks:
                head.serving(k)  # refuses what no engine could serve, before anything is made for it
    except (ValueError, TypeError) as error:
        raise UserError(f"head: {error}") from error
    if cfg.train.recompute and head.recompute is None:
        raise UserError("train.recompute=true: this head has no depths that go through layers one after the other; set it to false")
    kept = kept_for(head.needs_last, cfg.data.teacher)
    if (top_k(kept) or 0) > spec.vocab_size:
        raise UserError(f"data.teacher={kept}: the target has {spec.vocab_size} tokens: lower it, or set it to last")
    if head.kv_layers and cfg.data.states != "online":
        raise UserError(
            f"data.states={cfg.data.states}: this head reads the target's keys and values, which no capture stores: it trains with "
            "data.states=online alone, where each rank runs the target"
        )
    return head


def memory(cfg: RunConfig, head: DraftHead, spec: TargetSpec, world: int) -> dict[str, int]:
    """Bytes on one GPU by part; P trained parameters, b bytes of the compute dtype, w = world.

    ZeRO (Rajbhandari et al. 2020, figure 1) with float32 masters and float32 gradient sums:
      weights P b, / w at stage 3;   gradients 4 P, / w from stage 2;   masters 4 P / w;   Adam's two moments 8 P / w, Muon's one 4 P / w.
    Activations kept for the backward pass, per row worked on (`worked` of heads) and decoder block (hidden size D, N query heads and G
    key/value heads of size H, inner width I): inputs of the norms and of the projections behind them 5 D; q, k, v and
    the attention's output (N + 2 G) H + N H; gate, up and their product 3 I (of experts: MixtureOfExperts.kept); the lm_head's input and
    its gradient 2 D. All times b. Under sequence parallelism a rank keeps its part of the rows, and of the others depth 0 (an upper
    bound). With train.recompute that of one depth, of every row its state D and keys and values 2 G H a block, and D of embeddings once.
    Loss, one chunk of C label positions: the teacher's probabilities and a pass's scratch in float32, and the logits, of k depths where
    those of a trained lm_head or term wait for one another (heads.chunk.kept_depths), C U (8 + k b).
    Where the states are worked out in the training, the whole target and a layer's activations of one document, in its dtype.
    Allocator overhead and communication buffers are left out, and on a CPU what heads/blocked.py keeps: N S numbers a row and block in
    documents of 2 S tokens.
    """
    P, b, T = sum(p.numel() for p in head.parameters()), ITEMSIZE[cfg.train.dtype], longest_batch(cfg)
    V, stage = spec.vocab_size, int(cfg.zero["stage"])
    U = head.draft_vocab_size or V
    specs = [module.spec for module in head.modules() if isinstance(module, Attention)]
    D, (rows, outputs), ranks = _width(head, spec), worked(head, T), cfg.train.sequence_parallel
    rows = rows / ranks + T - T / ranks
    layers = rows * head_activations(head)
    if cfg.train.recompute:
        layers = layers / head.depths + rows * (D + sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs)) + T * D
    k = top_k(kept_for(head.needs_last, cfg.data.teacher))
    teacher = 8 * k if k else spec.hidden_size * (head.needs_last != "none") * b
    chunk = min(int(cfg.head.get("loss_chunk", T)), T)  # a head without chunks takes all positions at once
    own = any(p.dim() == 2 and len(p) == U for p in head.parameters())  # an lm_head or term; with one for each depth none waits: less then
    waiting = kept_depths(chunk, U, b, head.depths) if own else 1
    target = (target_parameters(spec) + cfg.data.max_length * block_activations(spec)) * ITEMSIZE[cfg.target.dtype]
    gathered_rows = U if U < V else 0  # the target's lm_head rows of a reduced vocabulary are a copy
    return {
        "head weights": P * b // (world if stage == 3 else 1),
        "float32 masters": 4 * P // world,
        "optimizer moments": (4 if cfg.optim.algorithm == "muon" else 8) * P // world,
        "gradients": 4 * P // (world if stage >= 2 else 1),
        "frozen embedding and lm_head": (frozen_parameters(spec) + gathered_rows * spec.hidden_size) * b,
        "activations": round(layers + outputs / ranks * 2 * D) * b,
        "loss chunk": chunk * U * (8 + b * waiting),
        "hidden states of a batch": T * ((spec.hidden_size * len(head.taps) + _kv_numbers(head)) * b + teacher),
    } | ({"target": target} if runs_target(cfg, head) else {})


def _kv_numbers(head: DraftHead) -> int:
    """Keys and values of a token that the head reads."""
    kinds = (head.target.kinds or {}).values()
    return sum(2 * kind["num_kv_heads"] * kind["head_dim"] for kind in kinds if kind["layer"] in head.kv_layers)


def worked(head: DraftHead, tokens: int) -> tuple[float, float]:
    """See ChainHead.worked."""
    assert isinstance(head, ChainHead | BlockHead)
    return head.worked(tokens)


def _width(head: DraftHead, spec: TargetSpec) -> int:
    """Hidden size at the head's lm_head: the target's, unless its blocks have one of their own."""
    return max((module.spec.hidden_size for module in head.modules() if isinstance(module, Attention)), default=spec.hidden_size)


def flops_per_token(head: DraftHead, spec: TargetSpec, length: int, tokens: int) -> float:
    """Floating-point operations of one training token in a batch of `tokens`, every position supervised: an upper bound for data with
    prompts.

    Per row worked on 2 per parameter forward and 4 backward, for all matrices but those with a row for each token of the vocabulary, and
    of experts for those alone that a row meets;
    attention scores and values over half of `length` on average; lm_head over U: the teacher's 2 D U once where its states are read, per
    row that reaches it forward and input gradient 4 D U, and where it is trained the weight gradient 2 D U more. An embedding of its own
    costs nothing to look up; it can be the lm_head too.
    """
    D, U, (rows, outputs) = _width(head, spec), head.draft_vocab_size or spec.vocab_size, worked(head, tokens)
    matrices = [p.shape for p in head.parameters() if p.dim() > 1]
    trained_head = (U, D) in matrices
    inner = sum(shape.numel() for shape in matrices if shape[0] not in (U, spec.vocab_size)) - idle_parameters(head)
    attention = sum(12 * m.spec.num_heads * m.spec.head_dim * (length / 2) for m in head.modules() if isinstance(m, Attention))
    teacher = 2 * spec.hidden_size * U if head.needs_last != "none" else 0
    return teacher + (rows * (6 * inner + attention) + outputs * (6 if trained_head else 4) * D * U) / tokens


def runs_target(cfg: RunConfig, head: DraftHead) -> bool:
    """Whether the training ranks run the target."""
    return cfg.data.states == "online" and reads_states(head)


def reads_states(head: DraftHead) -> bool:
    return bool(head.taps) or head.needs_last != "none"


def count_tokens(cfg: RunConfig, split: str) -> Tokens | None:
    """From the store where it is finished and read, else from the answers there are so far, else the most that the conf allows. Another
    target's store and answers do not count."""
    manifest = closed_manifest(cfg, split) if split in cfg.data.whole_splits else None
    if manifest is not None and of_this_target(cfg, manifest):
        return Tokens(manifest["tokens"], manifest["supervised_tokens"], "store")
    prompts = count_prompts(cfg, split)
    wanted = None if prompts is None else prompts * (cfg.data.sampling.samples if split == "train" and cfg.data.answers == "target" else 1)
    longest = min(cfg.data.max_length, cfg.target.max_model_len)
    answers = Path(cfg.data.responses) / f"{split}.jsonl"
    ours = answers.is_file() and of_this_target(cfg, answers_meta(cfg, split))
    records = read_jsonl_tolerant(answers)[0] if ours else []
    if ours and (asked := read_asked(answers)) and asked["asks"] == asks(cfg.data, split):
        ids = set(asked["ids"])
        records, wanted = [r for r in records if r["id"] in ids], len(ids)
    if records:
        total = sum(min(len(r["prompt_ids"]) + len(r["response_ids"]), longest) for r in records)
        supervised = sum(b - a for r in records for a, b in spans_of(r, longest))
        share = (wanted or len(records)) / len(records)
        return Tokens(round(total * share), round(supervised * share), "answers")
    if wanted is None:
        return None
    answer = longest if cfg.data.answers == "given" and split == "train" else min(cfg.data.sampling.max_tokens, longest)
    return Tokens(wanted * longest, wanted * answer, "bound")


def count_prompts(cfg: RunConfig, split: str) -> int | None:
    limit = cfg.data.limit if split == "train" else cfg.data.heldout_limit
    if limit is not None:
        return limit
    given, written = split_sources(cfg.data.prompts)
    if any("hf:" in source for source in given):
        return None  # its size is known only once it is downloaded
    return len(select(read_prompts(given, ROOT, cfg.data.prompt_chars), split, None)) + (written if split == "train" else 0)


def window_sizes(cfg: RunConfig, head: DraftHead, world: int = 1) -> Sizes | None:
    """Of the window for the training; None where there is none. world: the ranks, or the fewest there can be. UserError: the head reads no
    states, or those between two checkpoints, of which none may be deleted before the second, have no room in it."""
    gb, data, train = cfg.data.window_gb, cfg.data, cfg.train
    if gb is None:
        return None
    if not reads_states(head):
        raise UserError(f"data.window_gb={gb:g}: this head reads no states, so there is nothing to bound; set it to null")
    token = plan_bytes(1, 1, len(set(head.taps)), head.target.hidden_size, kept_for(head.needs_last, data.teacher), data.states_dtype)
    sizes = Sizes.of(gb, token, data.max_length)
    step = token * longest_batch(cfg) * train.accum * max(1, world // train.sequence_parallel)
    between = step * min(train.save_every, train.steps)
    if between > sizes.usable:
        fitting, larger = int(sizes.usable // step), (gb + (between - sizes.usable) / 1e9) * 1.3
        advice = [f"train.save_every={fitting} or less"] if fitting >= 1 else []
        whole = store_size(cfg, head, head.target, count_tokens(cfg, "train"))
        if whole and whole <= larger * 1e9:
            advice.append(f"data.window_gb=null, for all of the training's states take {bytes_text(whole)}")
        else:
            advice.append(f"data.window_gb={larger:.3g}" + f" and data.max_store_gb={larger:.3g}" * (larger > data.max_store_gb))
        raise UserError(
            f"data.window_gb={gb:g}: up to {bytes_text(between)} of states lie between two checkpoints on {world} GPU{'s' * (world > 1)}, "
            f"and none may be deleted before the second; it has room for {bytes_text(max(sizes.usable, 0))}: set {', or '.join(advice)}"
        )
    return sizes


def longest_batch(cfg: RunConfig) -> int:
    """Tokens of a micro-batch, at most: a document over the budget is one by itself."""
    return max(cfg.train.micro_tokens, min(cfg.data.max_length, cfg.target.max_model_len))


def store_size(cfg: RunConfig, head: DraftHead, spec: TargetSpec, tokens: Tokens | None) -> int | None:
    if cfg.data.states == "online" or tokens is None:
        return 0 if cfg.data.states == "online" else None
    last = kept_for(head.needs_last, cfg.data.teacher)
    return plan_bytes(tokens.total, tokens.supervised, len(head.taps), spec.hidden_size, last, cfg.data.states_dtype)
