"""The methods of an evaluation: what each is called, how vLLM is told to use it, and what must be there before an engine starts."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data.engine import Drafting, engine_identity
from data.errors import UserError
from data.files import read_object
from data.target import spec
from eval.export import check_fingerprint, check_path, read_export, validate_export
from eval.quantize import check_device
from heads import build
from heads.base import TargetSpec

if TYPE_CHECKING:
    from train.config import RunConfig

NAMES = {"none": "plain", "ngram": "n-gram", "suffix": "suffix", "draft_model": "draft model", "head": "head", "offline": "head, offline"}
LOOKUPS: dict[str, dict[str, Any]] = {  # they find their drafts in text, which costs next to nothing
    "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    # Without the answers of other requests: the same prompts come again at each concurrency.
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
}
SUFFIX_PACKAGE = ("arctic_inference", "arctic-inference==0.1.1")  # its module, and what vLLM 0.32 asks for
# Published heads: by the type that vLLM's own format for them states (`speculators_model_type`), else by a word in the architecture's name.
PUBLISHED_TYPES: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "dflash": {"method": "dflash"},
    "dspark": {"method": "dspark"},
}
PUBLISHED_WORDS = {"eagle3": "eagle3", "eagle": "eagle", "dspark": "dspark", "dflash": "dflash", "medusa": "medusa"}


# Whose number of drafts vLLM's own schedule by batch size (0.32, V1 runner) sets in a running engine; the others are started with each k.
SCHEDULED, SCHEDULED_IN = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"), "0.32."


def label(method: str) -> str:
    """What a reader calls it; a published head goes by the name of its folder."""
    return NAMES.get(method) or Path(method).name


def speculation(cfg: RunConfig, method: str, k: int, export_dir: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """(--speculative-config, --hf-overrides of the target) of a method with k drafts a pass."""
    drafts: dict[str, Any] = {"num_speculative_tokens": k}
    if method == "none":
        return None, {}
    if method in LOOKUPS:
        return LOOKUPS[method] | drafts, {}
    if cfg.eval.draft_sample_method != "greedy":
        drafts["draft_sample_method"] = cfg.eval.draft_sample_method
    if method == "draft_model":
        return {"method": "draft_model", **drafts, "model": cfg.eval.draft_model}, {}
    folder = export_dir if method == "head" else Path(method)
    serving = published(folder) | drafts
    overrides = serving.pop("target_hf_overrides", {})
    return {**serving, "model": str(folder)}, overrides


def drafting(cfg: RunConfig, method: str, export_dir: Path) -> list[Drafting]:
    """The engines that measure a method with every k of cfg.eval: one for all, where the number of drafts of a running engine can be set
    and a greedy run's counts are then those of an engine started with it (tests/test_turns.py); else one for each."""
    if method == "none":
        return [Drafting(None, {}, (0,))]
    ks = tuple(cfg.eval.ks)
    speculative, overrides = speculation(cfg, method, max(ks), export_dir)
    assert speculative is not None
    known = speculative["method"] in SCHEDULED and "parallel_drafting" not in speculative
    if known and not cfg.eval.temperature and not torch.cuda.is_available() and engine_identity()["version"].startswith(SCHEDULED_IN):
        return [Drafting(speculative, overrides, ks)]
    return [Drafting({**speculative, "num_speculative_tokens": k}, overrides, (k,)) for k in ks]


def server(target_dir: Path, dtype: str, speculative: dict[str, Any] | None, overrides: dict[str, Any]) -> list[list[str]]:
    """The words that serve the target with a method, as it was measured, in the parts that one line each holds. Not `vllm serve`, which is
    the same but does not start from the CPU wheel."""
    parts = [["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(target_dir), "--dtype", dtype]]
    parts += [["--speculative-config", json.dumps(speculative)]] if speculative else []
    return parts + ([["--hf-overrides", json.dumps(overrides)]] if overrides else [])


def shell(parts: list[list[str]]) -> str:
    """The command of these parts, to paste."""
    return " \\\n  ".join(map(shlex.join, parts))


def command(target_dir: Path, dtype: str, speculative: dict[str, Any] | None, overrides: dict[str, Any]) -> str:
    """The shell command that serves the target with a method, as it was measured."""
    return shell(server(target_dir, dtype, speculative, overrides))


def published(folder: Path) -> dict[str, Any]:
    """The speculative config of a head's folder, without its path and number of drafts. vLLM itself would guess from the folder's name.

    UserError: config.json does not say what the head is."""
    if (folder / "draftsmith.json").is_file():
        return read_export(folder)["serving"]
    config = read_object(folder / "config.json", "eval.methods takes names of methods and folders of heads in the Hugging Face format")
    kind = config.get("speculators_model_type")
    if kind in PUBLISHED_TYPES:
        return dict(PUBLISHED_TYPES[kind])
    names = [kind] if kind else [*(config.get("architectures") or []), config.get("model_type", "")]
    found = [method for word, method in PUBLISHED_WORDS.items() if not kind and word in " ".join(names).lower()]
    if found:
        return {"method": found[0]}
    raise UserError(
        f"eval.methods: {folder}/config.json says {', '.join(names)}, which names no head that is known ({', '.join(PUBLISHED_WORDS)}); "
        "a whole language model is given as eval.draft_model=<folder> with the method draft_model"
    )


def check_methods(cfg: RunConfig, target_dir: Path, export_dir: Path) -> None:
    """UserError for whatever would stop the engine, or make it draft rubbish, found before the first engine starts."""
    target, methods = spec(target_dir), cfg.eval.methods
    module, package = SUFFIX_PACKAGE
    if "suffix" in methods and importlib.util.find_spec(module) is None:
        raise UserError(
            f"eval.methods: suffix needs the package {package}, which is not installed and is built by a C++ compiler "
            f"(pip install --no-deps {package}); or leave suffix out"
        )
    if "head" in methods:
        validate_export(export_dir, target)
        about = read_export(export_dir)
        check_fingerprint(about["target_fingerprint"], target_dir)
        if quantization := about.get("quantization"):
            check_device(
                quantization["scheme"], cfg.eval.dtype or cfg.target.dtype, torch.cuda.is_available(), torch.cpu.get_capabilities()
            )
        _check_depths(cfg.head, cfg.eval.ks, target)
    for folder in (Path(method) for method in methods if "/" in method):
        _check_published(folder, cfg.eval.ks, target_dir, target)
    if "draft_model" in methods:
        folder = Path(cfg.eval.draft_model or "")
        check_draft_model(folder, target)
        check_path(folder, "draft_model", "rename it, or link to it under another name")


def check_draft_model(folder: Path, target: TargetSpec) -> None:
    config = read_object(folder / "config.json", "eval.draft_model must be the folder of a Hugging Face model")
    _check_sizes("eval.draft_model", folder, {"vocab_size": config.get("vocab_size")}, target)


def _check_depths(head_cfg: dict[str, Any], ks: list[int], target: TargetSpec) -> None:
    try:
        with torch.device("meta"):
            head = build(head_cfg, target)
        for k in ks:
            head.serving(k)
    except (ValueError, TypeError) as error:
        raise UserError(f"head: {error}") from error


def _check_published(folder: Path, ks: list[int], target_dir: Path, target: TargetSpec) -> None:
    serving = published(folder)
    if (folder / "draftsmith.json").is_file():
        validate_export(folder, target)
        about = read_export(folder)
        check_fingerprint(about["target_fingerprint"], target_dir)
        return _check_depths(about["head"], ks, target)
    config = read_object(folder / "config.json", "download it again")
    inner = config.get("transformer_layer_config") or config
    size = config.get("target_hidden_size") or inner.get("target_hidden_size") or inner.get("hidden_size")
    _check_sizes("eval.methods", folder, {"vocab_size": inner.get("vocab_size"), "hidden_size": size}, target)
    return check_path(folder, serving["method"], "rename it, or link to it under another name")


def _check_sizes(key: str, folder: Path, found: dict[str, int | None], target: TargetSpec) -> None:
    """A size that the folder does not state is left to the engine."""
    wanted = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    wrong = [f"{name} {size}, the target has {wanted[name]}" for name, size in found.items() if size not in (None, wanted[name])]
    if wrong:
        raise UserError(f"{key}: {folder} was made for another target ({'; '.join(wrong)}): choose one for this target")


def stamps(methods: list[str], draft_model: str | None) -> dict[str, list[tuple[str, int, int]]]:
    """Names, bytes and times (ns) of the files in the folders that a conf names: a report holds for these only."""
    folders = [Path(method) for method in methods if "/" in method]
    folders += [Path(draft_model)] if draft_model and "draft_model" in methods else []
    files = {str(folder): sorted(path for path in folder.glob("*") if path.is_file()) for folder in folders}
    return {name: [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found] for name, found in files.items()}
