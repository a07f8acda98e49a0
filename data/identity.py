"""Who made a set of responses or a store: the target as it was served, its tokenizer and its chat template."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.commands import command
from data.errors import UserError
from data.files import read_object
from data.manifest import unequal
from data.record import ChatRecord
from data.target import fingerprint, read_json

if TYPE_CHECKING:
    from train.config import DataConfig, TargetConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def tokenizer_hash(target_dir: Path) -> str:
    """sha256 (hex) of the files that turn text into ids."""
    return _hash([target_dir / name for name in TOKENIZER_FILES], "")


def template_hash(target_dir: Path) -> str:
    """sha256 (hex) of the chat template: a file of its own, or a key of tokenizer_config.json."""
    settings = read_json(target_dir / "tokenizer_config.json")
    return _hash([target_dir / name for name in TEMPLATE_FILES], json.dumps(settings.get("chat_template")))


def identity(target_dir: Path, cfg: TargetConfig) -> dict[str, Any]:
    """What responses and stores say of their maker: target {id, revision, fingerprint, dtype, quantisation} and two hashes."""
    quantisation = (read_json(target_dir / "config.json").get("quantization_config") or {}).get("quant_method")
    target = {"id": cfg.model, "revision": cfg.revision, "fingerprint": fingerprint(target_dir)}
    target |= {"dtype": cfg.dtype, "quantisation": quantisation}
    return {"target": target, "tokenizer_hash": tokenizer_hash(target_dir), "template_hash": template_hash(target_dir)}


def prompts_hash(records: list[ChatRecord]) -> str:
    """sha256 (hex) of what was asked: ids, messages, tools and meta, in order."""
    return _hash([], json.dumps([[r.id, r.messages, r.tools, r.meta] for r in records]))


def asks(data: DataConfig, split: str) -> dict[str, Any]:
    """The keys of the section `data` that decide which answers of a split are asked for."""
    keys = ["prompts", "limit" if split == "train" else "heldout_limit", "min_prompt_chars", "max_prompt_chars"]
    found = {key: getattr(data, key) for key in keys}
    return found | ({"sampling": {"samples": data.sampling.samples}} if split == "train" and data.answers == "target" else {})


def check_responses(path: Path, maker: dict[str, Any], asked_for: dict[str, Any]) -> None:
    """UserError: no responses at `path`, not all of them, another target, dtype, tokenizer or template wrote them, or the last that was
    asked for is not what `asks` says now."""
    meta = path.with_suffix(".meta.json")
    if not path.is_file() or not meta.is_file():
        raise UserError(f"{path}: no answers of the target here; sample them with `{command('respond')}`")
    if unfinished(path).exists():
        raise UserError(
            f"{path}: the sampling of these answers stopped before its end; `{command('respond')}` goes on, or delete "
            f"{unfinished(path)} to make do with them"
        )
    there = read_meta(meta)
    differ = [f"{key}: {there.get(key)} there, {maker[key]} now" for key in maker if there.get(key) != maker[key]]
    if differ:
        raise UserError(f"{path} was written by another target ({'; '.join(differ)}): choose another data.responses and sample anew")
    if (asked := read_asked(path)) is None:
        raise UserError(f"{path}: nothing beside it says what was asked for; `{command('respond')}` does, and samples only what is missing")
    if changed := unequal(asked["asks"], asked_for, "data"):
        said = "; ".join(f"{key} was {old}, is {new}" for key, old, new in changed)
        raise UserError(
            f"{path}: its answers were asked for otherwise ({said}): `{command('respond')}` samples what is missing, and keeps the others"
        )


def unfinished(path: Path) -> Path:
    """The empty file beside the answers at `path` while they are sampled; it stays where the sampling was stopped."""
    return path.with_suffix(".unfinished")


def read_asked(path: Path) -> dict[str, Any] | None:
    """What data.answers.write_asked has written beside the answers at `path`."""
    asked = path.with_suffix(".asked.json")
    if not asked.is_file():
        return None
    mend = f"delete it and run `{command('respond')}`"
    found = read_object(asked, mend)
    if not (isinstance(found.get("ids"), list) and isinstance(found.get("asks"), dict)):
        raise UserError(f"{asked}: does not say what was asked for; {mend}")
    return found


def read_meta(path: Path) -> dict[str, Any]:
    """What a `<split>.meta.json` beside answers says. UserError: it cannot be read, so nobody knows what wrote the answers."""
    return read_object(path, f"it says what wrote the answers: delete {path.parent} and run `{command('respond')}`")


def _hash(files: list[Path], extra: str) -> str:
    digest = hashlib.sha256(extra.encode())
    for path in files:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
