"""The frozen target on disk: where its folder is, what its config says, and the few tensors that a head reads of it.

No model is ever built here. Shape suffixes: D hidden, V vocab.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from data.builtin import BUILTIN
from data.errors import UserError
from data.files import read_object
from data.target_config import check_supported, gemma4, glm4_moe, rope
from heads.base import Frozen, TargetSpec
from heads.target import Moe

if TYPE_CHECKING:
    from train.config import TargetConfig

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
WHOLE = (torch.float32, torch.bfloat16, torch.float16)
SAMPLES, SAMPLE_BYTES = 16, 65536  # per weight file, for the fingerprint

EMBEDDING = re.compile(r"(^|(?<!\d)\.)embed_tokens\.weight$")  # not the copy of an MTP module, `layers.<n>.embed_tokens`
LM_HEAD = re.compile(r"(^|\.)lm_head\.weight$")
FINAL_NORM = re.compile(r"(^|^model\.|(^|\.)language_model\.|(^|\.)language_model\.model\.)norm\.weight$")


def resolve(cfg: TargetConfig, root: Path) -> Path:
    """The folder with the target's config, tokenizer and weights: found, downloaded, or (builtin:...) built under `root`/store/targets.

    Raises UserError where there is none, where a needed file is missing, and where the conf's `target.spec` contradicts config.json.
    """
    folder = _builtin(cfg.model, root) if cfg.model.startswith("builtin:") else _local_or_hub(cfg, root)
    _check_files(folder)
    found = spec(folder)  # also where there is nothing to compare: it refuses targets that are not supported
    if cfg.spec:
        _check_spec(spec_from_config(cfg), found, folder)
    return folder


def _builtin(model: str, root: Path) -> Path:
    name = model.removeprefix("builtin:")
    if name not in BUILTIN:
        raise UserError(f"target.model={model}: no such built-in target. There is: {', '.join('builtin:' + n for n in sorted(BUILTIN))}")
    return BUILTIN[name](root / "store" / "targets" / name)


def local_folder(cfg: TargetConfig, root: Path) -> Path | None:
    """The user's own folder that target.model names; None for a hub id or a built-in target. UserError: it names none of these."""
    local = root / Path(cfg.model).expanduser()  # an absolute path stays itself
    if local.is_dir():
        return local
    if not HUB_ID.match(cfg.model) and not cfg.model.startswith("builtin:"):
        raise UserError(f"target.model={cfg.model}: no such folder ({local}), and no hub id of the form owner/name.")
    return None


def planned_spec(cfg: TargetConfig, root: Path) -> TargetSpec:
    """What a plan goes by, without weights: config.json of a local folder, else the dimensions that the conf states. UserError: no such
    folder, or it has other dimensions than the conf."""
    if (folder := local_folder(cfg, root)) is None:
        return spec_from_config(cfg)
    found = spec(folder)
    if cfg.spec:
        _check_spec(spec_from_config(cfg), found, folder)
    return found


def _local_or_hub(cfg: TargetConfig, root: Path) -> Path:
    if local := local_folder(cfg, root):
        return local
    try:
        return Path(snapshot_download(cfg.model, revision=cfg.revision, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:  # ValueError: an id that the hub would not allow
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"target.model={cfg.model}: cannot be downloaded ({reason}). Where the hub asks for it, accept its licence there and run "
            "`hf auth login`; or give a local folder: target.model=/path/to/folder"
        ) from error


def _check_files(folder: Path) -> None:
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        missing.append("tokenizer.json")
    if not list(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise UserError(
            f"target folder {folder}: no {', no '.join(missing)}. It must be a Hugging Face model folder with safetensors weights."
        )
    for path in sorted({*folder.glob("*.safetensors"), *_tensor_files(folder).values()}):
        _open(path, lambda f: f.keys())  # also compares the file's length with its header: cut downloads and Git LFS pointers end here


def spec_from_config(cfg: TargetConfig) -> TargetSpec:
    """The dimensions that conf/target/<name>.yaml states: enough to plan and to build heads without any weights."""
    known = [f.name for f in fields(TargetSpec)]
    unknown = sorted(set(cfg.spec) - set(known))
    if unknown:
        raise UserError(f"target.spec: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    try:
        return _sound(TargetSpec(**cfg.spec), f"target.spec of {cfg.model}")
    except TypeError as error:
        missing = str(error).partition("argument")[2].lstrip("s: ")
        raise UserError(f"target.spec of {cfg.model}: missing {missing}. Copy them from the target's config.json.") from error


def _sound(found: TargetSpec, where: str) -> TargetSpec:
    """The spec itself. UserError: dimensions that no model has."""
    for f in fields(TargetSpec):
        value = getattr(found, f.name)
        kind = {"int": int, "float": (int, float)}.get(str(f.type))
        if kind and (isinstance(value, bool) or not isinstance(value, kind) or value <= 0):
            raise UserError(f"{where}: {f.name}={value}: must be a positive {f.type}")
    if found.num_heads % found.num_kv_heads:
        raise UserError(f"{where}: {found.num_heads} query heads cannot share {found.num_kv_heads} key/value heads")
    if not isinstance(found.rope_scaling, dict | None):
        raise UserError(f"{where}: rope_scaling={found.rope_scaling}: must be null or a mapping, as in config.json")
    if found.moe is not None:
        keys = Moe.__annotations__
        if not isinstance(found.moe, dict) or set(found.moe) != set(keys):
            raise UserError(f"{where}: moe={found.moe}: must be null or a mapping of exactly {', '.join(keys)}")
        if not 0 < found.moe["chosen"] <= found.moe["experts"]:
            raise UserError(f"{where}: moe: {found.moe['chosen']} chosen of {found.moe['experts']} experts")
    return found


def _check_spec(stated: TargetSpec, found: TargetSpec, folder: Path) -> None:
    differences = [
        f"{f.name}: conf {getattr(stated, f.name)}, target {getattr(found, f.name)}"
        for f in fields(TargetSpec)
        if getattr(stated, f.name) != getattr(found, f.name)
    ]
    if differences:
        raise UserError(
            f"target.spec does not describe {folder / 'config.json'}: {'; '.join(differences)}. Correct conf/target/*.yaml, or choose a "
            "target file without `spec`: a local folder needs none"
        )


def spec(folder: Path) -> TargetSpec:
    """The dimensions in config.json; the text part of a multimodal one. Reads the rope keys of transformers 4 and of 5."""
    whole = read_json(folder / "config.json")
    config = whole.get("text_config", whole)
    check_supported(config, folder / "config.json")

    def need(key: str) -> Any:
        if key not in config:
            raise UserError(f"{folder / 'config.json'}: no key `{key}`. Is this a decoder-only language model?")
        return config[key]

    theta, scaling = rope(config)
    heads = need("num_attention_heads")
    tied = config.get("tie_word_embeddings", whole.get("tie_word_embeddings"))
    found = TargetSpec(
        hidden_size=need("hidden_size"),
        num_layers=need("num_hidden_layers"),
        vocab_size=need("vocab_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or need("hidden_size") // heads,
        intermediate_size=need("intermediate_size"),
        rms_norm_eps=need("rms_norm_eps"),
        rope_theta=theta,
        max_positions=need("max_position_embeddings"),
        rope_scaling=scaling,
        architecture=str((whole.get("architectures") or config.get("architectures") or ["unknown"])[0]),
        # Model families disagree on the default of this key, so where config.json omits it the weights decide.
        tied_embeddings=bool(tied) if tied is not None else not any(LM_HEAD.search(name) for name in _tensor_files(folder)),
        moe=glm4_moe(config, folder / "config.json") if config.get("model_type") == "glm4_moe" else None,
        **(gemma4(folder) if config.get("model_type") == "gemma4_text" else {}),
    )
    return _sound(found, str(folder / "config.json"))


def frozen(folder: Path, dtype: torch.dtype, device: torch.device | str) -> Frozen:
    """Embedding and lm_head [V, D], cast to `dtype` on `device`. Where the target ties them they are one and the same tensor."""
    files = _tensor_files(folder)

    def read(pattern: re.Pattern[str]) -> torch.Tensor:
        return _read(files, pattern, folder).to(device=device, dtype=dtype)

    embed_VD = read(EMBEDDING)
    lm_head_VD = embed_VD if spec(folder).tied_embeddings else read(LM_HEAD)
    return Frozen(embed_VD, lm_head_VD)


def tensors(folder: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Tensors of these names, as they are stored. UserError: the target has none of such a name, or has it rounded."""
    files = _tensor_files(folder)
    if missing := [name for name in names if name not in files]:
        raise UserError(
            f"target folder {folder}: no tensor {missing[0]}, with which this head begins ({len(missing)} are missing): its config names "
            "a family that ships this module, but it was saved without; download the whole target, or choose another head"
        )
    found = {name: _open(files[name], lambda f, name=name: f.get_tensor(name)) for name in names}
    if rounded := {name: x.dtype for name, x in found.items() if x.dtype not in WHOLE}:
        name, dtype = next(iter(rounded.items()))
        raise UserError(
            f"target folder {folder}: {name} is stored as {dtype} ({len(rounded)} are rounded): the head begins with these and does "
            "not read their scales; name the target that is not quantised"
        )
    return found


def final_norm(folder: Path) -> torch.Tensor:
    """Weight [D] of the norm between the last layer and lm_head, in its stored dtype."""
    return _read(_tensor_files(folder), FINAL_NORM, folder)


def fingerprint(folder: Path) -> str:
    """sha256 (hex) over config.json and, per weight file, its size, its safetensors header and evenly spread samples of its bytes.

    Sampling keeps it under a second for 70B; another fine-tune of the same model differs in every sample.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as f:
            header = int.from_bytes(f.read(8), "little")
            digest.update(f.read(header))
            for i in range(SAMPLES):
                f.seek(8 + header + (size - 8 - header) * i // SAMPLES)
                digest.update(f.read(SAMPLE_BYTES))
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of the target. UserError: no such file, or none."""
    return read_object(path, "the target must be a Hugging Face model folder, so download it again")


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it, from the index where the weights are sharded."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{index}: no `weight_map` that says which file holds which tensor. Download the target again.")
        return {name: folder / file for name, file in weight_map.items()}
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(dict.fromkeys(_open(path, lambda f: list(f.keys())), path))
    return found


def _read(files: dict[str, Path], pattern: re.Pattern[str], folder: Path) -> torch.Tensor:
    names = [name for name in files if pattern.search(name)]
    if len(names) != 1:
        raise UserError(f"target folder {folder}: expected one tensor like `{pattern.pattern}`, found {names or 'none'}.")
    return _open(files[names[0]], lambda f: f.get_tensor(names[0]))


def _open(path: Path, use: Callable[[Any], Any]) -> Any:
    try:
        with safe_open(path, framework="pt") as f:
            return use(f)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: unreadable weights ({error}). Download or build the target again.") from error
