"""Who made a set of responses or a store: the target as it was served, its tokenizer and its chat template."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from data.target import fingerprint

if TYPE_CHECKING:
    from train.config import TargetConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def tokenizer_hash(target_dir: Path) -> str:
    """sha256 (hex) of the files that turn text into ids."""
    return _hash([target_dir / name for name in TOKENIZER_FILES], "")


def template_hash(target_dir: Path) -> str:
    """sha256 (hex) of the chat template: a file of its own, or a key of tokenizer_config.json."""
    settings = json.loads((target_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    return _hash([target_dir / name for name in TEMPLATE_FILES], json.dumps(settings.get("chat_template")))


def identity(target_dir: Path, cfg: TargetConfig) -> dict[str, Any]:
    """What responses and stores say of their maker: target {id, revision, fingerprint, dtype, quantisation} and two hashes."""
    config = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
    quantisation = config.get("quantization_config", {}).get("quant_method")
    target = {"id": cfg.model, "revision": cfg.revision, "fingerprint": fingerprint(target_dir)}
    target |= {"dtype": cfg.dtype, "quantisation": quantisation}
    return {"target": target, "tokenizer_hash": tokenizer_hash(target_dir), "template_hash": template_hash(target_dir)}


def check_responses(path: Path, maker: dict[str, Any]) -> None:
    """UserError: no responses at `path`, or another target, dtype, tokenizer or template wrote them."""
    meta = path.with_suffix(".meta.json")
    if not path.is_file() or not meta.is_file():
        raise UserError(f"{path}: no answers of the target here; sample them with `python launch/respond.py conf=<name>`")
    there = json.loads(meta.read_text(encoding="utf-8"))
    differ = [f"{key}: {there.get(key)} there, {maker[key]} now" for key in maker if there.get(key) != maker[key]]
    if differ:
        raise UserError(f"{path} was written by another target ({'; '.join(differ)}): choose another data.responses and sample anew")


def _hash(files: list[Path], extra: str) -> str:
    digest = hashlib.sha256(extra.encode())
    for path in files:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
