"""Who runs when where several engines are measured side by side: plain decoding and the others take turns over slices of the prompts.

A machine's speed drifts by more than most methods gain, so a speed-up is taken between neighbours in time. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

BLOCK = 6  # speculative turns for one of plain decoding
ROUNDS = 2  # at least, so that what comes late in one comes early in another

Result = dict[str, Any]  # what one turn gives (data/engine_measure.py), or several joined


class Turn(NamedTuple):
    """One engine with k drafts a pass over some of the prompts. block: the turns that share one of plain decoding."""

    engine: int
    k: int
    concurrency: int
    block: int
    items: list[int]


class Measured(NamedTuple):
    """All prompts by one engine with one k at one concurrency. reference: plain decoding in turn with it, or the only one there is;
    None for plain decoding itself. rounds: in which they took turns, 1 where they did not."""

    result: Result
    reference: Result | None
    rounds: int


def slices(count: int, concurrency: int) -> list[list[int]]:
    """The places of `count` prompts in even parts: twice as many as are in flight, and fewer where there would be one part."""
    parts = max(ROUNDS, math.ceil(count / (2 * concurrency)))
    parts = min(count, parts + parts % 2)  # as many there as back: a steady drift cancels
    return [list(range(count * i // parts, count * (i + 1) // parts)) for i in range(parts)]


def turns(engines: Sequence[Sequence[int]], concurrencies: Sequence[int], count: int) -> list[Turn]:
    """engines: the numbers of drafts of each; (0,) decodes plainly. With plain decoding first and others after it every slice of the
    `count` prompts goes through all of them, back and forth; an engine without the other takes all prompts at once."""
    cells = [(engine, k) for engine, ks in enumerate(engines) for k in ks]
    if len(cells) == 1 or cells[0][1]:
        return [Turn(*cell, c, 0, list(range(count))) for cell in cells for c in concurrencies]
    plain, *others = cells
    blocks = [others[i : i + BLOCK] for i in range(0, len(others), BLOCK)]
    found = []
    for concurrency in concurrencies:
        for number, items in enumerate(slices(count, concurrency)):
            one = [Turn(*cell, concurrency, b, items) for b, block in enumerate(blocks) for cell in (plain, *block)]
            found += one if number % 2 == 0 else one[::-1]
    return found


def measured(engines: Sequence[Sequence[int]], concurrencies: Sequence[int], order: list[Turn], results: list[Result]) -> list[Measured]:
    """One for each engine, k and concurrency, in that order. results: of the turns, in their order."""
    done: dict[tuple[int, int, int, int], list[tuple[list[int], Result]]] = {}
    for turn, result in zip(order, results, strict=True):
        done.setdefault(turn[:4], []).append((turn.items, result))
    whole = {key: joined([result for _, result in sorted(parts, key=lambda p: p[0])]) for key, parts in done.items()}
    found = []
    for engine, k, concurrency in ((e, k, c) for e, ks in enumerate(engines) for k in ks for c in concurrencies):
        blocks = [block for e, n, c, block in whole if (e, n, c) == (engine, k, concurrency)]
        result = averaged([whole[engine, k, concurrency, block] for block in blocks])
        reference = whole.get((0, 0, concurrency, blocks[0])) if k else None
        found.append(Measured(result, reference, len(done[engine, k, concurrency, blocks[0]])))
    return found


def joined(parts: list[Result]) -> Result:
    """One result of those over parts of the prompts: counts and seconds are sums."""
    outputs = {name: output for part in parts for name, output in part["outputs"].items()}
    counters = [part["counters"] for part in parts]
    counts: dict[str, Any] = {key: sum(c[key] for c in counters) for key in ("drafts", "draft_tokens", "accepted_tokens")}
    counts["accepted_per_position"] = [sum(at) for at in zip(*(c["accepted_per_position"] for c in counters), strict=True)]
    each = {key: [value for part in parts for value in part[key]] for key in ("ttft_ms", "itl_ms")}
    sums = {key: sum(part[key] for part in parts) for key in ("seconds", "output_tokens")}
    return {"outputs": outputs, **each, **sums, "counters": counts}


def averaged(results: list[Result]) -> Result:
    """The same prompts several times by one engine: the first answers, in the mean time."""
    times = {key: [fmean(values) for values in zip(*(r[key] for r in results), strict=True)] for key in ("ttft_ms", "itl_ms")}
    return {**results[0], **times, "seconds": fmean(r["seconds"] for r in results)}
