"""The plan of a run as a table on the console."""

from __future__ import annotations

from rich.table import Table

from data.files import bytes_text
from data.progress import table_console
from data.target import planned_spec
from train.config import ROOT, RunConfig
from train.devices import Device, here
from train.plan import Plan, plan
from train.verdict import verdict

OVER = "; a document may be longer than train.micro_tokens, and is a batch by itself"


def made(cfg: RunConfig, world: int, device: Device | None = None) -> list[Table | str]:
    """The plan of a run on `world` ranks as a table, and under it lines that say whether it fits. device: of each rank, or of all where
    it is a CPU; None: what is here. UserError: as data.target.planned_spec and train.plan.plan."""
    spec, device = planned_spec(cfg.target, ROOT), device or here()
    found = plan(cfg, spec, world)
    return [render(found, device), *verdict(cfg, spec, found, device)]


def show(parts: list[Table | str]) -> None:
    """Prints what `made` returned."""
    console = table_console()
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


def render(found: Plan, device: Device) -> Table:
    where = device.name if device.shared else f"{found.world} GPU{'s' if found.world > 1 else ''} ({device.name})"
    table = Table(title=f"plan of {found.name} on {where}", title_justify="left")
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_column("how it is reckoned")
    rows: list[tuple[str, str, str]] = [
        ("head", f"{found.head_parameters / 1e6:,.1f} M", f"{found.head}, trained parameters"),
        ("frozen", f"{found.frozen_parameters / 1e6:,.1f} M", "embedding and lm_head of the target"),
    ]
    rows += [(part, bytes_text(size), f"per rank, ZeRO {found.stage}") for part, size in found.memory.items()]
    rows += [("memory", bytes_text(sum(found.memory.values())), "per rank, sum of the above; without allocator overhead")]
    rows += _data_rows(found)
    table_end = [
        ("steps", f"{found.steps:,}", f"of up to {found.tokens_per_step:,} tokens{_epochs(found)}{OVER if found.over_budget else ''}"),
        ("compute", f"{found.flops:.2g} FLOP", "of the training, all steps and ranks"),
    ]
    for row in rows + table_end:
        table.add_row(*row)
    return table


def _data_rows(found: Plan) -> list[tuple[str, str, str]]:
    if found.tokens is None or found.store_bytes is None:
        return [("tokens", "unknown", "set data.limit and data.heldout_limit to bound them")]
    how = {"store": "counted in the store", "answers": "from the answers there are", "bound": "at most: every answer at its limit"}
    window = "" if found.window_gb is None else f", a window of data.window_gb={found.window_gb:g}, captured anew each epoch"
    teacher = "" if found.teacher == "last" else f", data.teacher={found.teacher}"
    capture = ("capture", f"{found.capture_flops:.2g} FLOP", "the target's forward pass")
    return [
        ("training tokens", f"{found.tokens.total:,}", f"{how[found.tokens.source]}; {found.tokens.supervised:,} supervised"),
        ("store on disk", bytes_text(found.store_bytes), f"data.states_dtype={found.states_dtype}{teacher}{window}")
        if found.states == "store"
        else ("store on disk", "none", f"data.states={found.states}: each rank runs the target beside the training"),
        *([capture] if found.capture_flops else []),
    ]


def _epochs(found: Plan) -> str:
    if not found.tokens or not found.tokens.total:
        return ""
    epochs = found.steps * found.tokens_per_step / found.tokens.total
    return f": {'at most ' if found.over_budget else 'at least ' if found.tokens.source == 'bound' else ''}{epochs:.1f} epochs"
