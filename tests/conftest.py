"""Shared fixtures: a small target that needs no files, random batches, and every head of conf/head/."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from data.builtin import build_tiny
from data.commands import GIVEN
from data.errors import UserError
from heads import build
from heads.base import Batch, DraftHead, Frozen, TargetSpec

ROOT = Path(__file__).resolve().parents[1]
SPEC = TargetSpec(
    hidden_size=64,
    num_layers=4,
    vocab_size=101,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=96,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_positions=512,
    architecture="MiMoForCausalLM",  # a family that ships a module of its own, which heads may ask for
    kinds={  # and keys and values that heads may read
        "sliding_attention": {
            "layer": 1,
            "num_kv_heads": 1,
            "head_dim": 16,
            "window": 4,
            "rope_theta": 1000.0,
            "rope_scaling": None,
        },
        "full_attention": {
            "layer": 0,
            "num_kv_heads": 2,
            "head_dim": 24,
            "window": None,
            "rope_theta": 50000.0,
            "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        },
    },
)


def refused(call: Callable[[], object], *words: str) -> None:
    """`call` raises a UserError whose one line holds all the words."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def plugin_installed(folder: Path) -> Path:
    """A folder that, on PYTHONPATH, makes vLLM find the entry points of pyproject.toml, as an installed checkout does."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / "path" / "draftsmith_plugin-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: draftsmith-plugin\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in found.items()) for group, found in groups.items()]
    (info / "entry_points.txt").write_text("".join(lines))
    return info.parent


def store_manifest(taps: tuple[int, ...], hidden_size: int) -> dict[str, Any]:
    """The identity of a capture, for stores of random states."""
    return {
        "target": {"id": "t", "revision": None, "fingerprint": "f0", "dtype": "bfloat16", "quantisation": None},
        "tokenizer_hash": "tok",
        "template_hash": "tpl",
        "taps": list(taps),
        "hidden_size": hidden_size,
        "last": "supervised",
        "dtype": "bfloat16",
        "engine": {"name": "vllm", "version": "0.32.0"},
    }


def head_confs(small: bool = True) -> dict[str, dict[str, Any]]:
    """Every head of conf/head/, with taps, mask token and draft vocabulary brought to the size of SPEC; `small`: sizes of its own too."""
    confs = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "conf" / "head").glob("*.yaml"))}
    for conf in confs.values():
        if conf.get("taps"):
            conf["taps"] = [1, 2, 3]
        if "draft_vocab_size" in conf:
            conf["draft_vocab_size"] = 40
        if "mask_token_id" in conf:
            conf["mask_token_id"] = 7
        if small and "hidden_size" in conf:
            sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 48}
            conf |= {key: size for key, size in sizes.items() if key in conf}
    return confs


def ready(conf: dict[str, Any], dtype: torch.dtype = torch.float64, spec: TargetSpec = SPEC) -> DraftHead:
    """The head with random parameters, attached to a random frozen target of SPEC's sizes."""
    torch.manual_seed(0)
    head = build(conf, spec).to(dtype)
    embed, lm_head = (torch.randn(SPEC.vocab_size, SPEC.hidden_size, dtype=dtype) for _ in range(2))
    frozen = Frozen(embed, lm_head)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() > 1 else 1.0)
    if head.draft_vocab_size is not None:
        head.set_draft_vocab(torch.arange(0, 80, 2))
    head.attach(frozen)
    return head


def batch_of(head: DraftHead, lengths: tuple[int, ...] = (9, 14, 6), dtype: torch.dtype = torch.float64, seed: int = 1) -> Batch:
    """Random documents: the first third of each is a prompt, the rest is supervised. No states that the head does not ask for."""
    torch.manual_seed(seed)
    total, size = sum(lengths), SPEC.hidden_size
    mask = torch.cat([torch.arange(n) >= n // 3 for n in lengths])
    taps = torch.randn(total, len(head.taps), size, dtype=dtype) if head.taps else None
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tokens, last = torch.randint(0, SPEC.vocab_size, (total,)), torch.randn(total, size, dtype=dtype)
    kinds = {kind["layer"]: kind for kind in (SPEC.kinds or {}).values()}
    shapes = [(total, 2, kinds[layer]["num_kv_heads"], kinds[layer]["head_dim"]) for layer in head.kv_layers]
    kv = [torch.randn(shape, dtype=dtype) / 4 for shape in shapes]  # normed keys are as small; larger ones make attention a choice
    return Batch(tokens, mask, offsets, taps, None if head.needs_last == "none" else last, kv)


def document(batch: Batch, i: int) -> Batch:
    """Document i of a packed batch alone."""
    a, b = batch.offsets_S1[i : i + 2].tolist()
    part = slice(a, b)
    states = (None if x is None else x[part] for x in (batch.taps_TLD, batch.last_TD))
    kv = [x[part] for x in batch.kv]
    return Batch(batch.token_ids_T[part], batch.loss_mask_T[part], torch.tensor([0, b - a]), *states, kv)


@pytest.fixture(params=sorted(head_confs()))
def conf(request: pytest.FixtureRequest) -> dict[str, Any]:
    return head_confs()[request.param]


@pytest.fixture
def head(conf: dict[str, Any]) -> DraftHead:
    return ready(conf)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in tiny target."""
    return build_tiny(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of its answers."""
    from live import make_answers  # imports the trainer, which takes its time

    return make_answers(target, tmp_path_factory.mktemp("made"))


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test gives on a command line is not in the messages of the next."""
    monkeypatch.setenv(GIVEN, "")  # so that it is put back
    monkeypatch.delenv(GIVEN)
