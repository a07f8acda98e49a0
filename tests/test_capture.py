"""What capture says and refuses before any engine starts: sizes, cuts, and a store that holds something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refused

from data.builtin import build_tiny
from data.engine import capture
from data.errors import UserError
from data.manifest import as_stored
from data.store import Store, StoreWriter
from train.config import TargetConfig

SIZE, LONGEST = 64, 20
MANIFEST = {"target": {"fingerprint": "f"}, "tokenizer_hash": "t", "template_hash": "t", "engine": {"name": "vllm"}}
MANIFEST |= {"taps": [0, 1], "hidden_size": SIZE, "last": "none", "dtype": "float32"}
# prompt and response lengths: one cut at LONGEST, one whose response lies beyond it
LENGTHS = {"short#0": (4, 6), "long#0": (10, 30), "beyond#0": (25, 5), "other#0": (3, 9)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("target") / "tiny")


def answers(seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    ids = {name: torch.randint(500, (p + r,), generator=generator).tolist() for name, (p, r) in LENGTHS.items()}
    ends = {name: LENGTHS[name][0] for name in ids}
    return [{"id": n, "prompt_ids": x[: ends[n]], "response_ids": x[ends[n] :], "finish_reason": "stop"} for n, x in ids.items()]


def stored(folder: Path, left_out: str = "beyond#0") -> Path:
    """The store that a finished capture leaves."""
    with StoreWriter(folder, MANIFEST, shard_tokens=25) as writer:
        for a in answers():
            if a["id"] != left_out:
                ids = torch.tensor(a["prompt_ids"] + a["response_ids"])[:LONGEST]
                writer.add(a["id"], ids, torch.arange(len(ids)) >= len(a["prompt_ids"]), torch.zeros(len(ids), 2, SIZE))
    return folder


def take(target: Path, folder: Path, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    responses = folder.parent / "train.jsonl"
    responses.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = TargetConfig(model=str(target), dtype="float32", max_model_len=64)
    settings = {"taps": (0, 1), "last": "none", "max_length": LONGEST, "manifest": MANIFEST, "cap_gb": 1.0, **more}
    return capture(target_dir=target, target_cfg=cfg, responses=responses, store_dir=folder, **settings)


def test_bytes_cuts_and_what_is_left_out_are_said_and_finished_work_is_not_done_again(target, tmp_path, capsys):
    folder = stored(tmp_path / "store")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    counts = take(target, folder, answers())
    assert (counts["sequences"], counts["cut"], counts["left_out"], counts["tokens"]) == (3, 1, 1, 10 + LONGEST + 12)
    said = capsys.readouterr().out
    need = (10 + LONGEST + 12) * (5 + 2 * SIZE * 4)
    assert f"{need / 1e3:.2f} kB of states" in said and "3 sequences, 42 tokens" in said
    assert "1 cut at 20 tokens, 1 left out" in said
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_smaller_limit_needs_no_new_capture(target, tmp_path):
    assert take(target, stored(tmp_path / "store"), answers(), max_length=12)["tokens"] == 10 + 12 + 12


STALE = {
    "a larger limit": (answers(), {"max_length": 30}, r"long#0 has 20 tokens there and 30 others now.*data\.max_length"),
    "answers sampled again": (answers(seed=1), {}, r"short#0 has 10 tokens .* sampled again"),
    "an answer that is gone": (answers()[1:], {}, "1 sequences in it, short#0 the first, are no answers to what this conf asks now"),
    "other taps": (answers(), {"taps": (0, 2), "manifest": MANIFEST | {"taps": [0, 2]}}, "holds another capture .*taps"),
    "another template": (answers(), {"manifest": MANIFEST | {"template_hash": "u"}}, "holds another capture .*template_hash"),
    "another target": (answers(seed=1), {"manifest": MANIFEST | {"target": {"fingerprint": "g"}}}, "holds another capture .*fingerprint"),
}


@pytest.mark.parametrize(
    ("taps", "last", "goes_on"),
    [([1], "none", True), ([0, 1], "none", True), ([], "none", True), ([2], "none", False), ([1], "all", False)],
)
def test_a_store_with_more_taps_than_a_head_reads_goes_on_as_it_is(taps, last, goes_on, target, tmp_path):
    folder = stored(tmp_path / "store")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    found = as_stored(folder, MANIFEST | {"taps": taps, "last": last})
    assert (found == MANIFEST) == goes_on and as_stored(tmp_path / "none", found) == found
    if goes_on:
        assert take(target, folder, answers(), taps=tuple(found["taps"]), manifest=found)["sequences"] == 3
    else:
        refused(lambda: take(target, folder, answers(), taps=tuple(taps), last=last, manifest=found), str(folder), "another capture")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("case", STALE)
def test_a_stale_store_is_refused_with_the_difference_and_stays_as_it_is(case, target, tmp_path):
    rows, changes, message = STALE[case]
    folder = stored(tmp_path / "store")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match=message) as caught:
        take(target, folder, rows, **changes)
    assert "launch/capture.py" in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert Store(folder, verify=True).manifest["closed"]


def test_a_shard_that_cannot_be_read_is_named(target, tmp_path):
    folder = stored(tmp_path / "store")
    shard = folder / "shard-00000.safetensors"
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    with pytest.raises(UserError, match=r"shard-00000\.safetensors: unreadable .*rm "):
        take(target, folder, answers())


def test_answers_of_which_nothing_is_left_are_an_error(target, tmp_path):
    with pytest.raises(UserError, match=r"no answer with a token within data\.max_length=3"):
        take(target, tmp_path / "store", answers(), max_length=3)
    assert not (tmp_path / "store").exists()


def test_slices_that_are_lost_as_a_whole_are_named(target, tmp_path, capsys):
    """b by its states, c for want of a response token within the limit; of a an answer is left."""
    rows = answers()
    for row, category in zip(rows, ("a", "b", "c", "a"), strict=True):
        row["meta"] = {"category": category}
    folder = stored(tmp_path / "store")
    take(target, folder, rows)
    assert "no answer at all of c (1): " in capsys.readouterr().out
    with StoreWriter(tmp_path / "spoilt", MANIFEST) as writer:
        for a in rows[:2] + rows[3:]:
            ids = torch.tensor(a["prompt_ids"] + a["response_ids"])[:LONGEST]
            states = torch.full((len(ids), 2, SIZE), float("nan" if a["id"] in ("long#0", "other#0") else "1"))
            writer.add(a["id"], ids, torch.arange(len(ids)) >= len(a["prompt_ids"]), states)
    take(target, tmp_path / "spoilt", rows)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "no answer at all" in line]
    assert "of b (1), c (1): " in line and str(tmp_path / "spoilt" / "quarantine.jsonl") in line
    take(target, folder, [row for row in rows if row["meta"]["category"] != "c"])
    assert "no answer at all" not in capsys.readouterr().out
