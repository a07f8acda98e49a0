"""Offline chain decoding: walks the target's own greedy answers with the training module, counting what the engine would
accept.

The engine's counters and these must agree; where they do not, states, export or numerics differ between training and serving.
Shape suffixes: T tokens of one document, k drafts of a pass.

How an answer ends in vLLM (0.32, scheduler.update_from_output, and seen in runs): a pass is counted before its tokens are cut
at the stop token or at max_tokens, so every drafting pass counts all of its k drafts, and accepted drafts beyond the end
count as accepted although nobody receives them. Only max_model_len shortens a draft. Hence the walk goes on past the end
where the target's continuation is known (`tail_ids`), and says how many draft positions it could not judge where it is not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from data.engine import capture, engine_identity
from data.errors import UserError
from data.forward import Forward
from data.identity import identity
from data.online import Answers
from data.prompts import read_jsonl_tolerant
from data.sequences import Sequences
from data.store import Store
from eval.accept import Counts, figures, greedy_accepted
from heads.base import Batch, DraftHead

if TYPE_CHECKING:
    from train.config import RunConfig


def chain(drafts_Tk: Tensor, token_ids: list[int], start: int, end: int | None = None) -> list[int]:
    """Accepted drafts of every pass over one answer at temperature 0.

    drafts_Tk: row t holds the drafts made once x_0..x_{t+1} and the states up to t are known (DraftHead.propose); token_ids:
    prompt, answer, and what is known of the target's own continuation; start: prompt length; end: prompt + answer, where the
    engine stopped (None: len(token_ids)).

    The prefill emits x_start without drafts. With n tokens committed the engine holds states up to n-2 and the drafts are row
    n-2. Rejected rows are run again with true states, so a later row never depends on earlier drafts. A pass emits its
    accepted drafts and one more."""
    end = len(token_ids) if end is None else end
    k = drafts_Tk.shape[1]
    drafts = drafts_Tk.tolist()
    accepted: list[int] = []
    n = start + 1
    while n < end:
        accepted.append(greedy_accepted(drafts[n - 2], token_ids[n : n + k]))
        n += accepted[-1] + 1
    return accepted


def unjudged(accepted: list[int], k: int, start: int, known: int) -> int:
    """Draft positions of the last pass whose truth lies beyond the `known` tokens: the engine may have accepted up to this
    many more."""
    reached = start + 1 + sum(accepted) + len(accepted)
    return k - accepted[-1] if accepted and reached > known else 0


@torch.no_grad()
def offline(
    head: DraftHead, store: Sequences, answers: list[dict[str, Any]], k: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Pooled figures of the head over the answers (response records, `tail_ids` where the continuation is known), from stored
    states.

    The keys of eval.accept.figures, `answers`, and `unjudged_drafts`: the engine's accepted count may exceed ours by at most
    this many."""
    place = {sequence: i for i, sequence in enumerate(store.ids)}
    missing = [answer["id"] for answer in answers if answer["id"] not in place]
    if missing:
        raise UserError(
            f"no states for {len(missing)} of {len(answers)} answers (first: {missing[0]}): they hold NaN or Inf; try eval.dtype=float32"
        )
    counts, unknown = Counts(), 0
    for answer in answers:
        item = store.get(place[answer["id"]], head.taps)
        stored, start = item["token_ids"].tolist(), len(answer["prompt_ids"])
        tokens = [*answer["prompt_ids"], *answer["response_ids"], *answer.get("tail_ids", [])]
        assert stored == tokens[: len(stored)], answer["id"]
        end = min(start + len(answer["response_ids"]), len(stored))
        accepted = _walk(counts, head, item, tokens, start, end, k, device, dtype)
        unknown += unjudged(accepted, k, start, len(tokens))
    return {"answers": len(answers), "unjudged_drafts": unknown, **figures(counts)}


def _walk(  # noqa: PLR0913
    counts: Counts, head: DraftHead, item: dict[str, Any], tokens: list[int], start: int, end: int, k: int, device: torch.device,
    dtype: torch.dtype,
) -> list[int]:  # fmt: skip
    """`chain` along one sequence of a store (item: as Sequences.get has it), which is added to the counts."""
    offsets_S1 = torch.tensor([0, len(item["token_ids"])])
    batch = Batch(item["token_ids"].long(), item["loss_mask"], offsets_S1, item["taps"], item["last"], item["kv"]).to(device, dtype)
    drafts_Tk, _ = head.propose(batch, k)
    accepted = chain(drafts_Tk, tokens, start, end)
    counts.add(end - start, len(accepted), k * len(accepted), [sum(a > i for a in accepted) for i in range(k)])
    return accepted


def spread(store: Sequences, count: int) -> list[int]:
    """Numbers of at most so many sequences, evenly over the store: the same ones each time."""
    return torch.linspace(0, len(store) - 1, min(count, len(store))).long().unique().tolist()


def most_drafts(head: DraftHead, k: int) -> int:
    """The most drafts up to k that the head makes in a pass; up to its depths where no engine serves it."""
    for fewer in range(k, 0, -1):
        try:
            head.serving(fewer)
        except ValueError:
            continue
        return fewer
    return min(k, head.depths)


@torch.no_grad()
def along_stored(  # noqa: PLR0913
    head: DraftHead, store: Sequences, chosen: Iterable[int], k: int, max_length: int, device: torch.device, dtype: torch.dtype
) -> Counts:
    """Counts along sequences of a store, each cut to max_length, from its first label to its end; a pass that reaches beyond the end counts
    the drafts there as refused. Draws no random number. ValueError: more drafts than the head makes."""
    counts = Counts(accepted_per_position=[0] * k)
    for i in chosen:
        item, start = store.get(i, head.taps, max_length), int(store.first_labels[i])
        tokens = item["token_ids"].tolist()
        if start < len(tokens):
            _walk(counts, head, item, tokens, start, len(tokens), k, device, dtype)
    return counts


def while_training(
    cfg: RunConfig, head: DraftHead, heldout: Sequences, rank: int, world: int
) -> Callable[[torch.device, torch.dtype], Tensor] | None:
    """What the training loop calls at each look at the held-out store: this rank's share of train.chain_docs sequences, walked with the
    weights of now. It returns [1 + k] float64: passes that drafted, and those in which each draft was accepted. None: nothing is to be
    walked, or the head has no `propose`."""
    if not cfg.train.chain_docs or type(head).propose is DraftHead.propose:
        return None
    mine, k = spread(heldout, cfg.train.chain_docs)[rank::world], most_drafts(head, max(cfg.eval.ks))

    def walk(device: torch.device, dtype: torch.dtype) -> Tensor:
        counts = along_stored(head, heldout, mine, k, cfg.data.max_length, device, dtype)
        return torch.tensor([counts.drafts, *counts.accepted_per_position], dtype=torch.float64)

    return walk


def answer_states(cfg: RunConfig, target_dir: Path, head: DraftHead, answers_path: Path, states_dir: Path) -> Sequences:
    """States of the answers (JSONL of response records) as `head` reads them, in the dtype of evaluation: captured in `states_dir`, or,
    of a head that reads keys and values, worked out by transformers when they are asked for."""
    if not head.kv_layers:
        return capture_answers(cfg, target_dir, head, answers_path, states_dir)
    dtype, device = getattr(torch, cfg.eval.dtype or cfg.target.dtype), next(head.parameters()).device
    forward = Forward(target_dir, sorted(set(head.taps)), dtype, device, cfg.target.trust_remote_code)
    return Answers(answers_path, cfg.target.max_model_len, forward, "all", identity(target_dir, cfg.target), head.kv_layers)


def capture_answers(cfg: RunConfig, target_dir: Path, head: DraftHead, answers_path: Path, states_dir: Path) -> Store:
    """States of the answers (JSONL of response records) as `head` reads them, captured and kept in the dtype of evaluation.
    Replaces states_dir."""
    shutil.rmtree(states_dir, ignore_errors=True)
    dtype = cfg.eval.dtype or cfg.target.dtype
    last = "all" if head.needs_last == "all" else "none"
    target_cfg = replace(cfg.target, dtype=dtype)
    manifest = {**identity(target_dir, target_cfg), "taps": list(head.taps), "hidden_size": head.target.hidden_size, "last": last}
    capture(
        target_dir=target_dir,
        target_cfg=target_cfg,
        responses=answers_path,
        store_dir=states_dir,
        taps=head.taps,
        last=last,
        max_length=cfg.target.max_model_len,
        manifest={**manifest, "dtype": dtype, "engine": engine_identity()},
        cap_gb=cfg.data.max_store_gb,
    )
    return Store(states_dir)


def offline_report(cfg: RunConfig, head: DraftHead, target_dir: Path, answers_path: Path) -> dict[str, Any]:
    """Captures the states of the engine's own plain answers and walks them; the states are removed again.

    head: with weights and frozen parts attached, in its dtype, on its device. UserError: states missing, disk or memory too
    small."""
    states_dir = answers_path.parent / "states"
    try:
        store = answer_states(cfg, target_dir, head, answers_path, states_dir)
        parameter = next(head.parameters())
        answers, _ = read_jsonl_tolerant(answers_path)
        return {
            **offline(head, store, answers, max(cfg.eval.ks), parameter.device, parameter.dtype),
            "dtype": str(parameter.dtype).removeprefix("torch."),
        }
    finally:
        shutil.rmtree(states_dir, ignore_errors=True)
