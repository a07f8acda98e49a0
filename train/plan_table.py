"""The plan of a run as a table on the console."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from data.files import bytes_text
from train.plan import REACHED, Plan, hours

OVER = "; a document may be longer than train.micro_tokens, and is a batch by itself"


def show(found: Plan | None) -> None:
    """Prints the plan as a table, None not."""
    if found is not None:
        Console(width=None if sys.stdout.isatty() else 110, highlight=False).print(render(found))


def render(found: Plan) -> Table:
    table = Table(title=f"plan of {found.name} on {found.world} GPU{'s' if found.world > 1 else ''}", title_justify="left")
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_column("how it is reckoned")
    rows: list[tuple[str, str, str]] = [
        ("head", f"{found.head_parameters / 1e6:,.1f} M", f"{found.head}, trained parameters"),
        ("frozen", f"{found.frozen_parameters / 1e6:,.1f} M", "embedding and lm_head of the target"),
    ]
    rows += [(part, bytes_text(size), f"per GPU, ZeRO {found.stage}") for part, size in found.memory.items()]
    rows += [("memory", bytes_text(sum(found.memory.values())), "per GPU, sum of the above; without allocator overhead")]
    rows += _data_rows(found)
    table_end = [
        ("steps", f"{found.steps:,}", f"of up to {found.tokens_per_step:,} tokens{_epochs(found)}{OVER if found.over_budget else ''}"),
        (
            "compute",
            f"{found.flops:.2g} FLOP",
            f"{time_text(hours(found.flops, found.world))} on {found.world} x H100 at {REACHED:.0%} of peak, loading not counted",
        ),
    ]
    for row in rows + table_end:
        table.add_row(*row)
    return table


def _data_rows(found: Plan) -> list[tuple[str, str, str]]:
    if found.tokens is None or found.store_bytes is None:
        return [("tokens", "unknown", "set data.limit and data.heldout_limit to bound them")]
    how = {"store": "counted in the store", "answers": "from the answers there are", "bound": "at most: every answer at its limit"}
    fits = "" if found.store_bytes <= found.max_store_gb * 1e9 else f"; over data.max_store_gb={found.max_store_gb:g}"
    window = "" if found.window_gb is None else f", a window of data.window_gb={found.window_gb:g}, captured anew each epoch"
    capture = (
        "capture",
        f"{found.capture_flops:.2g} FLOP",
        f"{time_text(hours(found.capture_flops, 1))} on one H100 at {REACHED:.0%} of peak",
    )
    return [
        ("training tokens", f"{found.tokens.total:,}", f"{how[found.tokens.source]}; {found.tokens.supervised:,} supervised"),
        ("store on disk", bytes_text(found.store_bytes), f"data.states_dtype={found.states_dtype}{window}{fits}")
        if found.states == "store"
        else ("store on disk", "none", f"data.states={found.states}: each rank runs the target beside the training"),
        *([capture] if found.capture_flops else []),
    ]


def _epochs(found: Plan) -> str:
    if not found.tokens or not found.tokens.total:
        return ""
    epochs = found.steps * found.tokens_per_step / found.tokens.total
    return f": {'at most ' if found.over_budget else 'at least ' if found.tokens.source == 'bound' else ''}{epochs:.1f} epochs"


def time_text(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{hours * 60:,.1f} min" if hours * 60 >= 1 else f"{hours * 3600:,.1f} s"
