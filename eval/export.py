"""A trained head as a folder that vLLM loads: config.json, model.safetensors, and draftsmith.json (what it is, how to serve it).

vLLM swallows many faults in such a folder silently (a missing norm becomes ones, a missing vocabulary map the identity,
missing tap ids a default) and drafts badly without a word. `validate_export` therefore holds the folder against what the
engine's class computes with, tensor by tensor; no folder is ever put in place before it passes.

Shape suffixes: D hidden, V vocab, U draft vocab.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data import target as targets
from data.commands import command
from data.errors import UserError
from data.files import read_object
from eval import quantize
from eval.layouts import LAYOUTS, check_config
from eval.moe_layout import FLOAT32
from heads import build
from heads.base import DraftHead, Export, Frozen, TargetSpec

FORMAT_VERSION = 1
FILES = {"config.json", "model.safetensors", "draftsmith.json"}


def again() -> str:
    return f"export again with `{command('export')}`"


def check_fingerprint(trained_on: str, target_dir: Path) -> None:
    """Refuses (UserError) a target that is not the one whose states the head was trained on."""
    found = targets.fingerprint(target_dir)
    if found != trained_on:
        raise UserError(
            f"the head was trained on a target with fingerprint {trained_on}, but {target_dir} has {found}: "
            "set target.model (and target.revision) as in training, or train again on this target"
        )


def export_head(  # noqa: PLR0913
    head: DraftHead,
    frozen: Frozen,
    target_dir: Path,
    out: Path,
    *,
    dtype: torch.dtype,
    head_cfg: dict[str, Any],
    k: int,
    provenance: dict[str, Any],
    quantization: str | None = None,
) -> Path:
    """Writes `out` (replaced whole, atomically) and returns it.

    head: with its trained weights, on the device of the frozen parts. dtype: of the served target; the engine runs a head in no
    other. head_cfg: the head section of the run (`_target_` and arguments). k: drafts per pass in the stored serving JSON.
    quantization: a scheme of eval.quantize. UserError: the folder would not pass validate_export."""
    head.attach(frozen)
    if quantization is not None:
        quantize.check_scheme(quantization, head.serving(k)["method"], head.export().config["architectures"][0])
    tensors, config, full = engine_files(head, dtype, quantization)
    said = {"quantization": {"scheme": quantization, "bytes": quantize.size_of(tensors), "bytes_without": full}} if quantization else {}
    about = said | {
        "format_version": FORMAT_VERSION,
        "head": head_cfg,
        "serving": head.serving(k),
        "target_fingerprint": targets.fingerprint(target_dir),
        "provenance": provenance,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        for name, content in (("config.json", config), ("draftsmith.json", about)):
            (temporary / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        validate_export(temporary, targets.spec(target_dir))
        _put_in_place(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def engine_files(head: DraftHead, dtype: torch.dtype, quantization: str | None) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """What an export of the head holds: (tensors, config.json, bytes that the tensors would have without quantization)."""
    export, state = head.export(), head.state_dict()
    forgotten = [name for name, _ in head.named_parameters() if name not in export.names]
    assert not forgotten, f"{type(head).__name__}.export names no tensor for {forgotten}"
    whole = {theirs: state[ours] for ours, theirs in export.names.items()} | export.extra
    assert len(whole) == len(export.names) + len(export.extra), "two tensors under one name"
    tensors = {name: cast(tensor, torch.float32 if name.endswith(FLOAT32) else dtype) for name, tensor in whole.items()}
    config = engine_config(export, dtype)
    full = quantize.size_of(tensors)
    if quantization is not None:
        small, config["quantization_config"] = quantize.rounded(whole, quantization, dtype)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in quantize.rounded_names(whole)} | small
    return tensors, config, full


def trained_head(
    head_cfg: dict[str, Any], target_dir: Path, state: dict[str, Tensor], dtype: torch.dtype, device: torch.device | str
) -> DraftHead:
    """The head of a checkpoint with its frozen parts, in `dtype` on `device`, in evaluation mode. state: its state_dict.

    UserError: the conf's head section is not the one that was trained.
    """
    try:
        head = build(head_cfg, targets.spec(target_dir))
    except (ValueError, TypeError) as error:
        raise UserError(f"head: {error}") from error
    try:
        head.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the checkpoint does not fit the conf's head section ({reason}): use the conf it was trained with") from error
    head.to(device, dtype)
    head.attach(targets.frozen(target_dir, dtype, device))
    return head.eval()


def engine_config(export: Export, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the export. Nulls are left out: one is a default in one loader and a refusal in another."""
    given = {key: value for key, value in export.config.items() if value is not None}
    return given | {"dtype": str(dtype).removeprefix("torch.")}


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As it is stored: on the CPU, in the engine's dtype (integers as they are)."""
    tensor = tensor.detach().cpu()
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).clone().contiguous()


def _put_in_place(temporary: Path, out: Path) -> None:
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        out.rename(old)
    temporary.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def read_export(folder: Path) -> dict[str, Any]:
    """draftsmith.json of an export; UserError where there is none of this version."""
    path = folder / "draftsmith.json"
    if not path.is_file():
        raise UserError(f"{folder}: no export of ours here (no draftsmith.json); make one with `{command('export')}`")
    about = read_object(path, again())
    if about.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path}: format_version {about.get('format_version')}, this program reads {FORMAT_VERSION}: {again()}")
    for key, inner in (("serving", "method"), ("provenance", "checkpoint"), ("head", "_target_")):
        if not isinstance(about.get(key), dict) or inner not in about[key]:
            raise UserError(f"{path}: no {key}.{inner}: {again()}")
    return about


def validate_export(folder: Path, target: TargetSpec) -> None:
    """Refuses (one UserError that lists every fault) a folder that vLLM would refuse, or would load and draft badly with.

    Checks files, config keys that the engine would otherwise guess, the name, shape, dtype and finiteness of every tensor,
    and the draft-vocabulary map. Methods and architectures known: see eval/layouts.py."""
    about = read_export(folder)
    config = read_object(folder / "config.json", again())
    method, architecture = about["serving"]["method"], (config.get("architectures") or ["none"])[0]
    if (method, architecture) not in LAYOUTS:
        known = ", ".join(f"{a} ({m})" for m, a in LAYOUTS)
        raise UserError(
            f"{folder}/config.json: architecture {architecture} with method {method!r} is not checked by this program, which knows {known}"
        )
    check_path(folder, method, "set run_dir to another")
    faults = [f"unknown file {path.name}" for path in sorted(folder.iterdir()) if path.name not in FILES]
    faults += check_config(config, about["serving"], target)
    if faults:  # shapes follow from the config: with a broken one they mean nothing
        raise UserError(f"{folder}: not a sound export: {'; '.join(faults)}")
    try:
        faults = _check_tensors(folder / "model.safetensors", config, method)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder}/model.safetensors: unreadable ({error}): {again()}") from error
    if faults:
        raise UserError(f"{folder}: not a sound export: {'; '.join(faults)}")


def check_path(folder: Path, method: str, mend: str) -> None:
    """Any other method than those four is overruled by their names in the path, although it is given (vLLM 0.32, SpeculativeConfig)."""
    if method in ("eagle", "eagle3", "dflash", "dspark"):
        return
    for word in ("eagle-", "eagle3", "dflash", "dspark"):
        if word in str(folder.absolute()).lower():
            raise UserError(f"{folder}: vLLM would take a head of method {method} under a path with {word!r} in it for another: {mend}")


def _check_tensors(path: Path, config: dict[str, Any], method: str) -> list[str]:
    """Faults of the tensors against those that the engine's class reads."""
    shapes, optional = LAYOUTS[method, config["architectures"][0]](config)
    shapes, dtypes = quantize.stored(shapes, config) if "quantization_config" in config else (shapes, {})
    dtypes |= {name: torch.float32 for name in shapes if name.endswith(FLOAT32)}
    faults = []
    with safe_open(path, framework="pt") as f:
        plain = {name.replace("midlayer.", "layers.0."): name for name in f.keys()}  # noqa: SIM118 (no mapping)
        faults += [f"missing tensor {name}" for name in shapes if name not in plain and name not in optional]
        for name, stored in plain.items():
            if name not in shapes:
                faults.append(f"tensor {stored} has no place in {config['architectures'][0]}")
                continue
            tensor = f.get_tensor(stored)
            if tuple(tensor.shape) != shapes[name]:
                faults.append(f"{stored} has shape {list(tensor.shape)}, the config asks for {list(shapes[name])}")
            elif name == "d2t":
                faults += _check_d2t(tensor, config["vocab_size"])
            elif tensor.dtype != (asked := dtypes.get(name, getattr(torch, config["dtype"]))):
                faults.append(f"{stored} is {tensor.dtype}, the config says {asked}")
            elif not tensor.float().isfinite().all():
                faults.append(f"{stored} holds NaN or Inf")
    return faults


def _check_d2t(offsets_U: Tensor, vocab_size: int) -> list[str]:
    """The engine reads target id = j + d2t[j]; absolute ids or a repeated id load without a word."""
    if offsets_U.dtype != torch.int64:
        return [f"d2t is {offsets_U.dtype}, not torch.int64"]
    ids_U = offsets_U + torch.arange(len(offsets_U))
    if int(ids_U.min()) < 0 or int(ids_U.max()) >= vocab_size:
        return [f"d2t reaches target id {int(ids_U.max())} outside 0..{vocab_size - 1}: it must hold offsets (id - row), not ids"]
    if not bool((ids_U.diff() > 0).all()):
        return ["d2t does not ascend: two rows name one target id, or the map is unsorted"]
    return []
