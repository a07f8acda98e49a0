"""The loop: the same numbers for any split of a step over ranks, accumulation and ZeRO stages; and what stops it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from conftest import batch_of, head_confs, ready
from safetensors.torch import load_file

from data.batch import Batches
from data.errors import UserError
from data.store import Store
from tests.toy import ROOT, ToyHead, make_config, make_store, on_two_ranks, read_metrics, train
from train import checkpoint, dist, engine
from train.engine import Engine
from train.loop import seed_of

RESIZED = [(1, "float32"), (2, "bfloat16"), (3, "float32")]  # saved by one rank and resumed by two, and the reverse
GOLDEN = [float(line.split()[1]) for line in (ROOT / "tests/golden/toy_losses.txt").read_text().splitlines()]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("toy") / "store")


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run_dir)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_process_gives_the_golden_losses(tmp_path: Path, store: Path, stage: int) -> None:
    train(make_config(tmp_path, store, **{"train.accum": 2, "zero.stage": stage}))
    assert losses(tmp_path) == pytest.approx(GOLDEN, rel=1e-6)


def test_two_ranks_give_the_golden_losses_resume_and_uneven_validation(tmp_path: Path, store: Path) -> None:
    """One launch: ZeRO 1, 2, 3; crashes and their resumes; a held-out set of one batch, which leaves a rank without any."""
    jobs: list[dict] = [{"run_dir": f"stage{stage}", "set": {"zero.stage": stage}} for stage in (1, 2, 3)]
    halves = {"zero.stage": 3, "train.dtype": "bfloat16"}
    jobs += [{"run_dir": "halves", "set": halves}]
    for name, settings in (("broken", {"zero.stage": 2}), ("broken_halves", halves)):
        jobs += [{"run_dir": name, "set": settings, "stop_before": 7, "error": "went away"}, {"run_dir": name, "set": settings}]
    resized = {f"resized{stage}{dtype}": {"zero.stage": stage, "train.dtype": dtype} for stage, dtype in RESIZED}
    for name, settings in resized.items():
        with pytest.raises(RuntimeError, match="went away"):
            train(make_config(tmp_path / f"{name}up", store, **settings, **{"train.accum": 2}), stop_before=7)
        jobs += [
            {"run_dir": f"{name}up", "set": settings},
            {"run_dir": f"{name}down", "set": settings, "stop_before": 7, "error": "went away"},
        ]
    jobs += [{"run_dir": "shared", "noise": 0.0, "set": {"train.sequence_parallel": 2, "train.accum": 2}}]
    jobs += [{"run_dir": "uneven", "set": {"zero.stage": 3, "train.micro_tokens": 2000, "train.steps": 2}}]
    on_two_ranks(tmp_path, store, jobs)
    for stage in (1, 2, 3):
        assert losses(tmp_path / f"stage{stage}") == pytest.approx(GOLDEN, rel=1e-6)
    for one, other in (("stage2", "broken"), ("halves", "broken_halves")):
        assert losses(tmp_path / one) == losses(tmp_path / other)
        whole, resumed = (checkpoint.load_head(tmp_path / name / "step-000010") for name in (one, other))
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    for name, settings in resized.items():
        train(make_config(tmp_path / f"{name}down", store, **settings, **{"train.accum": 2}))
        for run_dir in (tmp_path / f"{name}up", tmp_path / f"{name}down"):
            assert losses(run_dir) == pytest.approx(GOLDEN, rel=1e-6 if settings["train.dtype"] == "float32" else 0.02), run_dir
            assert not list(run_dir.glob("*universal*"))
    train(make_config(tmp_path / "whole", store, **{"train.accum": 2}), noise=0.0)
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    whole, shared = (sum(line["loss_k"][0] for line in read_metrics(tmp_path / name, "val")) for name in ("whole", "shared"))
    assert shared == pytest.approx(whole, rel=1e-6)
    train(make_config(tmp_path / "alone", store, **{"train.micro_tokens": 2000, "train.accum": 2, "train.steps": 2}))
    uneven, alone = (read_metrics(tmp_path / name, "val")[0] for name in ("uneven", "alone"))
    assert uneven["loss_k"] == pytest.approx(alone["loss_k"], rel=1e-6) and uneven["accept_k"] == alone["accept_k"]


def test_a_step_is_the_gradient_of_the_mean_over_all_its_micro_batches(tmp_path: Path, store: Path) -> None:
    """Against plain autograd: sum_k weight_k * (all losses at depth k) / (all labels at depth k), whatever each micro-batch holds."""
    cfg = make_config(tmp_path, store, **{"train.accum": 3, "train.steps": 1})
    train(cfg)
    torch.manual_seed(cfg.train.seed)
    head = ToyHead()
    micros = Batches(Store(store), (), cfg.train.micro_tokens, cfg.train.seed, 0, 1, 4096).step(0, 3)
    weight_K = torch.tensor(head.depth_weights) / sum(head.count(batch) for batch in micros)
    outs = [(seed_of(cfg.train.seed, 0, m), head.loss(batch, weight_K))[1] for m, batch in enumerate(micros)]
    assert len({tuple(out.count_K.tolist()) for out in outs}) > 1, "micro-batches must differ in their counts"
    mean_K = sum(out.loss_K for out in outs) / sum(out.count_K for out in outs)
    loss = (mean_K * torch.tensor(head.depth_weights)).sum()
    sum(out.total for out in outs).backward()
    norm = torch.stack([p.grad.norm() for p in head.parameters() if p.grad is not None]).norm()
    record = read_metrics(tmp_path)[0]
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_training_learns_and_says_so(tmp_path: Path, store: Path) -> None:
    last = train(make_config(tmp_path, store, **{"train.steps": 30, "train.val_every": 100, "train.save_every": 100}))
    first = read_metrics(tmp_path)[0]
    assert last["hit_k"][0] > 0.8 > 0.4 > first["hit_k"][0], "depth 0 is a function of the state"
    assert last["hit_k"][1] < 0.4, "depth 1 is not"
    assert last["acceptance_length"] == pytest.approx(1 + sum(last["accept_k"]))
    assert {"lr", "grad_norm", "tokens_per_second", "data_wait", "seconds_left", "peak_memory_gb"} <= first.keys()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_masters_accumulate_updates_that_bf16_cannot_hold(tmp_path: Path, store: Path, stage: int) -> None:
    """Steps of 1e-5 on norm weights of 1.0, where neighbouring bfloat16 numbers are 4e-3 apart."""
    settings = {"train.dtype": "bfloat16", "zero.stage": stage, "optim.lr": 1e-5, "optim.schedule": "constant", "optim.warmup": 0.0}
    train(make_config(tmp_path, store, **settings))
    moved = (checkpoint.load_head(tmp_path / "step-000010")["norm.weight"] - 1).abs()
    assert moved.max() > 5e-5 and moved.max() < 1.1e-4


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "float32")])
def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path: Path, stage: int, dtype: str) -> None:
    """The spoilt sequence is named, every earlier step counts, and no checkpoint holds a NaN."""
    bad = make_store(tmp_path / "store", bad="s17")
    cfg = make_config(tmp_path / "run", bad, **{"zero.stage": stage, "train.dtype": dtype, "train.save_every": 1, "train.val_every": 100})
    data = Batches(Store(bad), (), cfg.train.micro_tokens, cfg.train.seed, 0, 1, 4096)
    step = next(i for i in range(100) if "s17" in data.sequences(i, 1))
    cfg.train.steps = step + 3
    with pytest.raises(UserError, match=rf"step {step + 1}: the loss or its gradient is not finite.*\bs17\b"):
        train(cfg)
    saved = checkpoint.latest(tmp_path / "run")
    assert (saved.name if saved else "step-000000") == f"step-{step:06d}"
    assert saved is None or all(value.isfinite().all() for value in checkpoint.load_head(saved).values())


@pytest.mark.parametrize("stage", [1, 3])
def test_recomputing_takes_the_same_step(tmp_path: Path, store: Path, stage: int) -> None:
    """Bit for bit, also where ZeRO gathers the weights for a head's backward."""
    dist.start(1)
    taken = []
    for again in (False, True):
        head = ready(head_confs()["eagle3"], torch.float32)
        head.recompute = again
        engine, batch = Engine(head, make_config(tmp_path, store, **{"zero.stage": stage})), batch_of(head, dtype=torch.float32)
        engine.backward(batch, head.count(batch))
        taken.append(engine.masters())
    assert all(torch.equal(taken[0][name], taken[1][name]) for name in taken[0])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("able", [None, False])
def test_out_of_memory_says_what_to_lower(tmp_path: Path, store: Path, device: str, able: bool | None) -> None:
    class Hungry(ToyHead):
        recompute = able

        def loss(self, batch, weight_K=None):
            if (tmp_path / "step-000002").exists():
                if device == "cuda":
                    raise torch.OutOfMemoryError("CUDA out of memory")
                torch.empty(1 << 60)
            return super().loss(batch, weight_K)

    with pytest.raises(UserError, match=r"step 3: out of memory at a batch of \d+ tokens.*train.micro_tokens=20 train.accum=2") as caught:
        train(make_config(tmp_path, store, **{"train.save_every": 2}), head=Hungry())
    assert ("train.recompute=true" in str(caught.value)) == (able is False)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000002"


def test_a_fault_of_the_program_is_not_taken_for_want_of_memory(tmp_path: Path, store: Path) -> None:
    class Broken(ToyHead):
        def loss(self, batch, weight_K=None):
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        train(make_config(tmp_path, store), head=Broken())


@pytest.mark.slow
def test_a_rank_without_a_label_and_one_that_dies(tmp_path: Path, store: Path) -> None:
    """Two launches. Of two ranks that share batches of one label each, one never has any: the losses are those of one rank alone. Of two
    ranks one is killed: the other stops at once, and what was saved is whole, so that a later run ends as if nothing had happened."""
    single = make_store(tmp_path / "single", one_label=True)
    settings = {"train.micro_tokens": 1, "train.log_every": 5}
    shared = {"run_dir": "shared", "store": str(single), "noise": 0.0, "set": settings | {"train.sequence_parallel": 2}}
    on_two_ranks(tmp_path, store, [shared])
    train(make_config(tmp_path / "alone", single, **settings), noise=0.0)
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6) and len(losses(tmp_path / "alone")) == 2
    began = time.monotonic()
    with pytest.raises(AssertionError, match="Signal 9|SIGKILL"):
        on_two_ranks(tmp_path, store, [{"run_dir": "dead", "set": {"train.save_every": 1}, "stop_before": 7, "dies": 1}])
    assert time.monotonic() - began < 200, "the other rank went on waiting"
    saved = checkpoint.latest(tmp_path / "dead")
    assert saved is not None and checkpoint.load_head(saved)
    train(make_config(tmp_path / "dead", store, **{"train.accum": 2}))
    assert losses(tmp_path / "dead") == pytest.approx(GOLDEN, rel=1e-6)


def test_a_window_without_labels_is_passed_over(tmp_path: Path) -> None:
    """A step whose sequences supervise nothing at any depth takes no step and stops nothing."""
    dist.start(1)
    folder = make_store(tmp_path / "store")
    cfg = make_config(tmp_path / "run", folder, **{"train.steps": 4})

    class Silent(ToyHead):
        def count(self, batch: object) -> torch.Tensor:
            return torch.zeros(2, dtype=torch.int64)

    train(cfg, head=Silent())
    assert losses(tmp_path / "run") == []
    assert (tmp_path / "run/latest").read_text() == "step-000004\n"


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_nothing_is_added_to_make_the_same_steps_in_either_dtype(
    tmp_path: Path, store: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One micro-batch of one rank in bfloat16: kept in bfloat16, and in float32 as where micro-batches are summed."""
    settings = {"train.dtype": "bfloat16", "zero.stage": stage, "train.steps": 6, "optim.clip": 1e-3}
    train(make_config(tmp_path / "as_they_come", store, **settings))
    config = engine.deepspeed_config
    monkeypatch.setattr(engine, "deepspeed_config", lambda cfg: config(cfg) | {"data_types": {"grad_accum_dtype": "fp32"}})
    train(make_config(tmp_path / "summed", store, **settings))
    first, second = (load_file(next((tmp_path / name).glob("step-*6")) / "head.safetensors") for name in ("as_they_come", "summed"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
