"""A small head, store and config for the training tests, and a program that trains them under torchrun:

torchrun --nproc_per_node 2 tests/toy.py jobs.json     [{run_dir, store, set: {dotted key: value}, noise, stop_before, dies, error}, ...]
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data.batch import Batches  # noqa: E402
from data.errors import UserError  # noqa: E402
from data.store import Store, StoreWriter  # noqa: E402
from heads.base import Batch, DraftHead, Frozen, LossOut  # noqa: E402
from tests.conftest import SPEC  # noqa: E402
from train import config, dist  # noqa: E402
from train.engine import Engine  # noqa: E402
from train.loop import fit  # noqa: E402

VOCAB, SIZE = 11, 8


class ToyHead(DraftHead):
    """Depth k guesses token t+1+k from the last state at t, through noise: a linear layer a depth, summed cross-entropy."""

    needs_last = "all"
    depths = 2
    depth_weights = (1.0, 0.5)

    def __init__(self, noise: float = 0.1) -> None:
        super().__init__()
        self.noise = noise
        self.norm = nn.LayerNorm(SIZE)
        self.layers = nn.ModuleList(nn.Linear(SIZE, VOCAB) for _ in range(2))
        self.register_buffer("draft_ids_U", torch.arange(VOCAB))
        self.target = SPEC

    def _rows(self, batch: Batch, k: int) -> Tensor:
        offsets, T = batch.offsets_S1, len(batch.token_ids_T)
        document_T = torch.bucketize(torch.arange(T), offsets[1:], right=True)
        t = torch.arange(max(0, T - 1 - k))
        return t[(document_T[t] == document_T[t + 1 + k]) & batch.loss_mask_T.cpu()[t + 1 + k]]

    def count(self, batch: Batch) -> Tensor:
        return torch.tensor([len(self._rows(batch, k)) for k in range(2)])

    def loss(self, batch: Batch, weight_K: Tensor | None = None) -> LossOut:
        assert batch.last_TD is not None
        x_TD = self.norm(batch.last_TD) + 0.0 * batch.last_TD.square()  # a huge state overflows here and makes the loss NaN
        if self.training:
            x_TD = x_TD + self.noise * torch.randn(x_TD.shape).to(x_TD)
        losses, hits = [], []
        for k, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            rows = self._rows(batch, k)
            labels = batch.token_ids_T[rows + 1 + k]
            logits = F.linear(x_TD[rows], layer.weight, layer.bias).float()  # the weight itself, as fused losses use it
            losses.append(F.cross_entropy(logits, labels, reduction="sum"))
            hits.append((logits.argmax(-1) == labels).sum())
        count_K = self.count(batch)
        hit_K = torch.stack(hits)
        loss_K = torch.stack(losses)
        total = loss_K.sum() if weight_K is None else (loss_K * weight_K).sum()
        return LossOut(total, loss_K.detach(), count_K, {"hit": (hit_K, count_K), "accept": (hit_K, count_K)})


def make_store(folder: Path, bad: str | None = None, one_label: bool = False) -> Path:
    """40 sequences whose next token follows from the state. `bad`: the sequence that gets a huge state (finite, but not its loss).
    one_label: each has its last token alone as a label."""
    generator = torch.Generator().manual_seed(5)
    table_VD = torch.randn(VOCAB, SIZE, generator=generator)
    manifest = {
        "target": {"id": "toy", "revision": None, "fingerprint": "toy", "dtype": "float32", "quantisation": None},
        "tokenizer_hash": "", "template_hash": "", "taps": [], "hidden_size": SIZE, "last": "all", "dtype": "float32",
        "engine": {"name": "toy", "version": "0"},
    }  # fmt: skip
    with StoreWriter(folder, manifest) as writer:
        for i in range(40):
            n = 6 + i % 9
            ids = torch.randint(VOCAB, (n,), generator=generator)
            mask = torch.arange(n) >= (n - 1 if one_label else 2 + i % 3)
            last = table_VD[ids.roll(-1)] + 0.3 * torch.randn(n, SIZE, generator=generator)
            writer.add(f"s{i}", ids, mask, None, last * (1e30 if bad == f"s{i}" else 1.0))
    return folder


def make_config(run_dir: Path, store: Path, **overrides: Any) -> config.RunConfig:
    """overrides: dotted keys, e.g. {"train.accum": 2}."""
    cfg = config.RunConfig(name="toy", run_dir=str(run_dir), head={"_target_": "tests.toy.ToyHead"}, zero={"stage": 1})
    cfg.target.model, cfg.data.store, cfg.data.responses = "toy", str(store), "none"
    steps = {"steps": 10, "micro_tokens": 40, "seed": 3, "dtype": "float32", "log_every": 1, "val_every": 5, "save_every": 5}
    cfg.train = dataclasses.replace(cfg.train, **steps)
    cfg.optim.lr, cfg.optim.weight_decay, cfg.log.wandb = 0.05, 0.1, False
    for key, value in overrides.items():
        *path, name = key.split(".")
        section: Any = cfg
        for part in path:
            section = getattr(section, part)
        if isinstance(section, dict):
            section[name] = value
        else:
            setattr(section, name, value)
    return cfg


def train(
    cfg: config.RunConfig, stop_before: int | None = None, head: DraftHead | None = None, noise: float = 0.1, dies: int | None = None
) -> dict[str, Any]:
    """One run. stop_before: the data of that step ends the run, as a crash does; dies: it kills that rank, and the others go on."""
    dist.start(1)
    torch.manual_seed(cfg.train.seed)
    head = head or ToyHead(noise)
    head.attach(Frozen(torch.zeros(VOCAB, SIZE), torch.zeros(VOCAB, SIZE)))
    data = (Store(Path(cfg.data.store)), (), cfg.train.micro_tokens, cfg.train.seed, dist.rank(), dist.world(), 4096)
    data += (cfg.train.sequence_parallel,)
    batches = Batches(*data)
    if stop_before is not None:
        whole = batches.step

        def step(i: int, accum: int) -> list[Batch]:
            if i >= stop_before and dies in (None, dist.rank()):
                if dies is not None:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("the machine went away")
            return whole(i, accum)

        batches.step = step
    return fit(cfg, Engine(head, cfg), batches, Batches(*data))


def on_two_ranks(folder: Path, store: Path, jobs: list[dict[str, Any]]) -> None:
    """The jobs one after another in one launch; run_dir is in `folder`."""
    (folder / "jobs.json").write_text(json.dumps([{"store": str(store)} | job | {"run_dir": str(folder / job["run_dir"])} for job in jobs]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*torchrun, __file__, str(folder / "jobs.json")], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def read_metrics(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        cfg = make_config(Path(job["run_dir"]), Path(job["store"]), **job.get("set", {}))
        try:
            train(cfg, job.get("stop_before"), noise=job.get("noise", 0.1), dies=job.get("dies"))
        except (UserError, RuntimeError) as error:
            if "error" not in job or job["error"] not in str(error):
                raise
    dist.stop()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
