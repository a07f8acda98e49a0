"""The doctor: a sound run has no fault; each cause, put in on purpose, is named, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.builtin import build_tiny
from data.check import Reference
from data.commands import GIVEN, command, remember
from data.identity import identity
from data.store import Store, StoreWriter
from data.target import frozen, spec
from eval import doctor
from eval.chain import offline
from eval.export import export_head, trained_head
from heads import build
from heads.base import Batch, DraftHead
from train.config import RunConfig, TargetConfig, load

ROOT = Path(__file__).resolve().parents[1]
START = 5  # tokens of a prompt


def sequence(reference: Reference, seed: int, worst: bool = False) -> Tensor:
    """A prompt and the target's own greedy answer to it. worst: the tokens that it would write last of all instead."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 500, (START,), generator=generator)
    for _ in range(20):
        logits_V = reference.states(ids)[1][-1] @ reference.lm_head_VD.T
        ids = torch.cat([ids, (-logits_V if worst else logits_V).argmax()[None]])
    return ids


def write_states(folder: Path, reference: Reference, change=lambda **x: x, worst: bool = False, **manifest: str) -> None:
    """folder/store of both splits, and the answers beside it. change: what a fault makes of one sequence."""
    target = TargetConfig(model=str(reference.folder), dtype="float32")
    about = {
        **identity(reference.folder, target),
        "taps": [0, 1, 2],
        "hidden_size": 64,
        "last": "supervised",
        "dtype": "float32",
    } | manifest
    for split, seed in (("train", 0), ("heldout", 10)):
        answers = []
        with StoreWriter(folder / "store" / split, about | {"engine": {"name": "t", "version": "0"}}) as writer:
            for i in range(3):
                ids = sequence(reference, seed + i, worst)
                streams, last = reference.states(ids)
                x = change(ids=ids, mask=torch.arange(len(ids)) >= START, streams=streams, taps=streams, last=last)
                writer.add(f"{split}{i}", x["ids"], x["mask"], x["taps"].contiguous(), x["last"].contiguous())
                answers.append({"id": f"{split}{i}", "prompt_ids": ids[:START].tolist(), "response_ids": ids[START:].tolist()})
        lines = (json.dumps(answer | {"finish_reason": "length"}) + "\n" for answer in answers)
        (folder / f"{split}.jsonl").write_text("".join(lines))


def packed(store: Store) -> Batch:
    items = [store.get(i, (0, 1, 2)) for i in range(len(store))]
    tokens, mask, taps, last = (torch.cat([item[key] for item in items]) for key in ("token_ids", "loss_mask", "taps", "last"))
    return Batch(tokens.long(), mask.bool(), torch.tensor([0, *store.lengths.tolist()]).cumsum(0), taps, last)


def curve(*losses: float, lr: float = 1e-3) -> str:
    lines = [{"kind": "train", "step": 10 * i, "loss": loss, "lr": lr} for i, loss in enumerate(losses, start=1)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_run(cfg: RunConfig, head: DraftHead, target: Path, losses: str) -> None:
    """cfg.run_dir with a checkpoint of the head, its export, and what is measured of it: teacher-forced and along the offline chain
    really, by the engine as offline."""
    run_dir, heldout = Path(cfg.run_dir), Store(Path(cfg.data.store) / "heldout")
    step = run_dir / "step-000001"
    step.mkdir(parents=True)
    save_file(head.state_dict(), step / "head.safetensors")
    (step / "state.json").write_text("{}")
    (run_dir / "latest").write_text("step-000001\n")
    about = {"head_cfg": cfg.head, "k": 3, "provenance": {"checkpoint": step.name}}
    export_head(head.eval(), head.frozen, target, run_dir / "export/vllm", dtype=torch.float32, **about)
    right, count = head.loss(packed(heldout)).metrics["accept"]
    val = {"kind": "val", "step": 20, "acceptance_length": 1 + float((right / count).sum()), "accept_k": (right / count).tolist()}
    (run_dir / "metrics.jsonl").write_text(losses + json.dumps(val) + "\n" + '{"kind": "tr')  # its last line cut short by a kill
    answers = [json.loads(line) for line in (Path(cfg.data.responses) / "heldout.jsonl").read_text().splitlines()]
    found = offline(head, heldout, answers, 3, torch.device("cpu"), torch.float32) | {"dtype": "float32"}
    engine = found | {"method": "head", "k": 3, "concurrency": 1}
    (run_dir / "eval").mkdir()
    (run_dir / "eval/report.json").write_text(json.dumps({"offline": found, "methods": [engine], "target": {"dtype": "float32"}}))


def fresh_head(cfg: RunConfig, target: Path) -> DraftHead:
    torch.manual_seed(0)
    head = build(cfg.head, spec(target))
    head.attach(frozen(target, torch.float32, "cpu"))
    return head


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, config, target folder): stores of the target's own greedy text, and the run of a head that learnt it."""
    folder = tmp_path_factory.mktemp("doctor")
    target = build_tiny(folder / "target")
    write_states(folder, Reference(target))
    paths = [f"target.model={target}", f"data.store={folder}/store", f"data.responses={folder}", f"run_dir={folder}/run"]
    cfg = load(["conf=tiny_eagle3", *paths])
    head, batch = fresh_head(cfg, target), packed(Store(folder / "store/heldout"))
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        head.loss(batch).total.backward()
        optimizer.step()
    write_run(cfg, head, target, curve(9.0, 3.0))
    return folder, cfg, target


def causes(cfg: RunConfig, target: Path, head_cfg=None, state=None):
    state = state or load_file(Path(cfg.run_dir) / "step-000001/head.safetensors")
    head = trained_head(head_cfg or cfg.head, target, state, torch.float32, "cpu")
    return [fault.cause for fault in doctor.diagnose(cfg, head, target, 1)[1]]


def test_a_sound_run_has_no_fault_and_all_figures(made):
    folder, cfg, target = made
    head = trained_head(cfg.head, target, load_file(folder / "run/step-000001/head.safetensors"), torch.float32, "cpu")
    found, faults, looked = doctor.diagnose(cfg, head, target, 1)
    assert not faults and looked == ["states", "masks", "vocabulary", "export"]
    assert {*found} == {"teacher-forced", "chain, held-out store", "offline chain", "engine"}
    assert all(row["length"] > 1.3 for row in found.values())
    assert found["chain, held-out store"] == found["offline chain"], "here both walk the same answers"


FAULTY_STORES = {
    "off-policy": {"worst": True},
    "tap": {"change": lambda **x: x | {"taps": x["streams"][:, [0, 2, 2]]}},
    "norm": {"change": lambda **x: x | {"last": x["streams"][:, -1]}},
    "mask": {"change": lambda **x: x | {"mask": x["mask"].roll(1)}},
    "slot": {"change": lambda **x: x | {"last": x["last"].roll(1, 0)}},
    "template": {"template_hash": "another"},
}


@pytest.mark.parametrize("cause", FAULTY_STORES)
def test_each_fault_of_the_states_is_named(made, tmp_path, cause):
    _, cfg, target = made
    write_states(tmp_path, Reference(target), **FAULTY_STORES[cause])
    data = dataclasses.replace(cfg.data, store=str(tmp_path / "store"), responses=str(tmp_path))
    assert set(causes(dataclasses.replace(cfg, data=data), target)) == {cause}


def edited(path: Path, change):
    """Writes what `change` makes of the JSON at `path`; returns a function that puts the old text back."""
    old = path.read_text()
    path.write_text(json.dumps(change(json.loads(old))))
    return lambda: path.write_text(old)


def engine(share: float, **more):
    """A report whose engine accepts that share of what the offline chain does."""

    def change(report):
        head = report["methods"][0]
        return report | {"methods": [head | {"acceptance_length": share * head["acceptance_length"]}], **more}

    return change


@pytest.mark.parametrize(
    ("file", "change", "cause"),
    [
        ("export/vllm/config.json", lambda c: c | {"rope_theta": 500.0}, "rope"),
        ("export/vllm/config.json", lambda c: c | {"norm_before_residual": True}, "norm"),
        ("export/vllm/config.json", lambda c: c | {"draft_vocab_size": 40}, "export"),
        ("eval/report.json", engine(0.9), "numerics"),
        ("eval/report.json", engine(0.9, target={"dtype": "bfloat16"}), "dtype"),
        ("eval/report.json", lambda r: r | {"offline": r["offline"] | {"acceptance_length": 1.0}, "methods": []}, "text"),
    ],
)
def test_each_cause_is_named(made, file, change, cause):
    folder, cfg, target = made
    undo = edited(folder / "run" / file, change)
    try:
        assert causes(cfg, target) == [cause]
    finally:
        undo()


NOTHING = {"length": 1.02, "positions": [0.02, 0.0, None]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (curve(8.0, 7.99, 8.01, lr=1e-12), ["has not fallen in 30 steps (8.000 to 8.010)", "learning rates up to 1.0e-12", "optim.lr"]),
        (curve(8.0, 30.0, lr=9.0), ["rose from 8.000 to 30.000", "smaller optim.lr"]),
        (curve(8.0, float("nan"), lr=9.0), ["rose from 8.000 to nan", "smaller optim.lr"]),
        (curve(8.0, 7.0, 6.0), ["fell from 8.000 to 6.000", "Go on: `", "train.steps="]),
        (curve(8.0), ["has not fallen in 10 steps", "more train.steps"]),
        ("", ["no curve", "launch/train.py"]),
    ],
)
def test_a_head_that_accepts_nothing_is_untrained_and_its_curve_says_why(text, words):
    lines = [json.loads(line) for line in text.splitlines()]
    for found in ({"teacher-forced": NOTHING}, {"teacher-forced": NOTHING, "engine": NOTHING}):
        [fault] = doctor.untrained_faults(found, lines)
        assert fault.cause == "untrained" and all(word in fault.text for word in ["nearly nothing (2.0%", *words]), fault.text


@pytest.mark.parametrize("name", ["teacher-forced", "offline chain", "engine"])
def test_a_head_that_accepts_in_one_place_has_learnt(name):
    found = dict.fromkeys(["teacher-forced", "offline chain", "engine"], NOTHING) | {name: {"length": 1.6, "positions": [0.4, 0.2, 0.0]}}
    assert doctor.untrained_faults(found, []) == [] == doctor.untrained_faults({}, [])


def test_untrained_is_said_of_a_whole_run_and_only_where_nothing_else_explains_it(made, tmp_path):
    _, cfg, target = made
    cfg = dataclasses.replace(cfg, run_dir=str(tmp_path / "run"))
    write_run(cfg, fresh_head(cfg, target), target, curve(8.0, 8.0, lr=1e-12))
    assert causes(cfg, target) == ["untrained"]
    edited(tmp_path / "run/export/vllm/config.json", lambda c: c | {"rope_theta": 500.0})
    assert causes(cfg, target) == ["rope"]


def test_what_was_not_measured_is_said_so_and_not_called_sound(capsys):
    assert doctor.show({}, [], ["states"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("evaluate has not run with the head") == 2 and "no held-out line in metrics.jsonl" in shown
    assert "chain, held-out store" in shown and "walked only where" in shown
    assert "is not known yet: `python launch/evaluate.py conf=<name>`" in " ".join(shown.split()) and "export" not in shown
    doctor.show({"teacher-forced": NOTHING, "offline chain": NOTHING, "engine": NOTHING}, [], ["states", "export"])
    shown = capsys.readouterr().out
    assert "not run" not in shown and "not known" not in shown and "0.020 0.000 -" in shown and "states, export" in shown


def test_an_export_of_other_weights_is_named(made):
    folder, cfg, target = made
    state = load_file(folder / "run/step-000001/head.safetensors")
    assert causes(cfg, target, state=state | {"fc.weight": state["fc.weight"] + 1e-3}) == ["weights"]


def test_a_draft_vocabulary_of_the_wrong_tokens_is_named(made):
    _, cfg, target = made
    head = build(cfg.head | {"draft_vocab_size": 30}, spec(target))
    head.set_draft_vocab(torch.arange(30))
    assert causes(cfg, target, cfg.head | {"draft_vocab_size": 30}, head.state_dict())[0] == "vocabulary"


def test_the_command_says_it_all_and_exits_with_status_one_on_a_fault(made):
    folder, cfg, target = made
    undo = edited(folder / "run/export/vllm/config.json", lambda c: c | {"rope_theta": 500.0})
    words = [f"target.model={target}", f"data.store={folder}/store", f"data.responses={folder}", f"run_dir={folder}/run", "sample=1"]
    try:
        done = subprocess.run(
            [sys.executable, ROOT / "launch/doctor.py", "conf=tiny_eagle3", *words], capture_output=True, text=True, check=False
        )
    finally:
        undo()
    assert done.returncode == 1, done.stderr
    assert "3 sequences, 75 tokens, 60 supervised" in done.stdout and "offline chain" in done.stdout and "rope: " in done.stdout


def test_capture_checks_what_it_has_written(made):
    folder, _, target = made
    words = [f"target.model={target}", f"data.store={folder}/store", f"data.responses={folder}", "check=true"]
    command = [sys.executable, ROOT / "launch/capture.py", "conf=tiny_eagle3", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "against transformers: tap 0 0.0000" in done.stdout and "the store holds what it says" in done.stdout


def test_what_it_advises_can_be_pasted_with_what_was_given(made, monkeypatch):
    folder, cfg, target = made
    given = ["conf=tiny_eagle3", f"run_dir={folder}/run", "head.depths=3"]
    monkeypatch.setenv(GIVEN, "")  # put back afterwards
    remember(given)
    undo = edited(folder / "run/export/vllm/config.json", lambda c: c | {"rope_theta": 500.0})
    state = load_file(folder / "run/step-000001/head.safetensors")
    head = trained_head(cfg.head, target, state, torch.float32, "cpu")
    try:
        [fault] = [fault for fault in doctor.diagnose(cfg, head, target, 1)[1] if fault.cause == "rope"]
    finally:
        undo()
    assert f"export again with `{command('export')}`" in fault.text and all(word in fault.text for word in ("launch/export.py", *given))
    row = {"length": 2.0, "positions": [0.5], "dtype": "bfloat16"}
    [fault] = doctor.gap_faults({"offline chain": row, "engine": row | {"length": 1.5}}, [])
    assert all(word in fault.text for word in ("launch/evaluate.py", *given, "eval.dtype=float32`"))
    [fault] = doctor.gap_faults({"offline chain": row, "engine": row | {"length": 1.5, "scheme": "int4"}}, [])
    assert all(word in fault.text for word in ("launch/export.py", *given, "export.quantization=null`"))
