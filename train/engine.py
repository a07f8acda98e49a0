"""One optimizer on many ranks: DeepSpeed ZeRO 1, 2 or 3 around a head. The only importer of deepspeed.

Shape suffixes: K depths.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from data.errors import UserError
from heads.base import Batch, DraftHead, LossOut
from heads.kernels import compiling
from train import dist
from train.config import OptimConfig, RunConfig
from train.optim import param_groups

Objective = tuple[Tensor, Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]


def _deepspeed() -> ModuleType:
    """Imported late: it takes seconds, probes for compilers, and must know the device before it is loaded."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # it calls collectives by their old names
    if not torch.cuda.is_available():  # else it compiles a shared-memory all-reduce at its first start, and fails without a compiler
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def deepspeed_config(cfg: RunConfig) -> dict[str, Any]:
    whole = {"reduce_scatter": False} if cfg.optim.algorithm == "muon" else {}  # Muon's update is made of whole matrices
    # Nothing is added to the gradients of one micro-batch of one rank: they are copied in the dtype in which they come. (Under ZeRO 1
    # that dtype chooses the optimizer's class, and so the checkpoint's format; under ZeRO 3 Muon's update takes the gradient's place.)
    summed = cfg.train.accum * dist.world() > 1 or cfg.zero["stage"] == 1 or cfg.optim.algorithm == "muon"
    return {
        "train_micro_batch_size_per_gpu": 1,  # one packed batch
        "gradient_accumulation_steps": cfg.train.accum,
        "gradient_clipping": cfg.optim.clip,
        "zero_optimization": {**cfg.zero, **whole},
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW also where the states are offloaded: nothing to compile
        "bf16": {"enabled": cfg.train.dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32" if summed else None},
        "communication_data_type": "fp32" if summed else None,
    }


def _optimizer(head: DraftHead, optim: OptimConfig) -> torch.optim.Optimizer:
    groups = param_groups(head, optim, {size for size in (head.target.vocab_size, head.draft_vocab_size) if size})
    if optim.algorithm == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, fused=True)
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    if not torch.cuda.is_available() and not compiling():  # its update is compiled otherwise, which on a CPU takes a C++ compiler
        torch.compiler.set_stance("force_eager")
    for group in groups:  # what DeepSpeed's ZeRO looks for
        for parameter in group["params"]:
            parameter.use_muon = group["use_muon"]
    return MuonWithAuxAdam(groups)


class _Objective(nn.Module):
    """The head's loss as a `forward`, so that the hooks of ZeRO see it. Plain tensors out, which is all those hooks look into.

    anchor: a zero that wants a gradient. ZeRO 3 reduces the gradients of a gathered module once that of its inputs is known;
    the batch has none, and without an input that has, it would reduce (and give the weights away) before they are there.
    """

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, batch: Batch, weight_K: Tensor, anchor: Tensor) -> Objective:
        out = self.head.loss(batch, weight_K)
        assert out.total.requires_grad, "the loss must depend on the head's parameters, also where a batch supervises nothing"
        return out.total + anchor, out.loss_K, out.count_K, out.metrics


class Engine:
    """A head under training: gradients in, steps out. `head` must hold its frozen parts already (head.attach).

    dtype bfloat16 keeps float32 masters, moments and gradient sums; the head's own parameters are then bfloat16 copies.
    """

    def __init__(self, head: DraftHead, cfg: RunConfig) -> None:
        deepspeed = _deepspeed()
        self.device, self.dtype = dist.device(), getattr(torch, cfg.train.dtype)
        self.accum, self.stage = cfg.train.accum, int(cfg.zero["stage"])
        self.head = head
        self.weights_K = torch.tensor(head.depth_weights, device=self.device)
        objective = _Objective(head)
        if self.stage == 3:  # losses reach into weights without calling their modules, so the head is gathered as a whole
            deepspeed.utils.set_z3_leaf_modules(objective, [_Objective])
        try:
            deepspeed.runtime.zero.config.DeepSpeedZeroConfig(**cfg.zero)
        except ValueError as error:  # pydantic's: a line that counts, then two for each key
            raise UserError(f"zero: {' '.join(' '.join(str(error).splitlines()[1:3]).split())}; as conf/zero/*.yaml have it") from error
        optimizer = _optimizer(head, cfg.optim)
        self.lr_scales = [group["lr"] / cfg.optim.lr for group in optimizer.param_groups]
        self.ds, *_ = deepspeed.initialize(model=objective, optimizer=optimizer, config=deepspeed_config(cfg))

    def backward(self, batch: Batch, total_K: Tensor) -> LossOut:
        """Adds the gradient of one micro-batch. total_K: supervised positions of the whole step, over all its micro-batches and ranks.

        The step's loss is sum_k weight_k * (sum of the loss at depth k) / total_k. Returns the detached sums, on the device.
        """
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        # The one place of normalisation. DeepSpeed divides by the accumulation steps and averages over the ranks; both are
        # undone here, so that a step is the same for any split of its micro-batches over ranks and accumulation.
        weight_K = self.weights_K * (self.accum * dist.world()) / total_K.clamp(min=1).to(self.device)
        loss, loss_K, count_K, metrics = self.ds(batch.to(self.device, self.dtype), weight_K, anchor)
        # A loss that is not finite makes every gradient so, and DeepSpeed then refuses the step on all ranks.
        self.ds.backward(loss * torch.where(loss.detach().isfinite(), 1.0, float("nan")))
        self.ds.step()  # steps on the last micro-batch only
        return LossOut(loss.detach(), loss_K, count_K, metrics)

    def set_lr(self, lr: float) -> None:
        for group, scale in zip(self.ds.optimizer.param_groups, self.lr_scales, strict=True):
            group["lr"] = lr * scale

    @property
    def skipped(self) -> bool:
        """Whether the last step was refused because its loss or gradient was not finite. The same on every rank."""
        return bool(self.ds.optimizer.overflow)

    @property
    def grad_norm(self) -> Tensor | float:
        """L2 norm of the last step's gradient, before clipping."""
        return self.ds.get_global_grad_norm()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside, head.loss may be called without gradients, by each rank as often as it likes: no rank waits for another."""
        parameters = list(self.head.parameters()) if self.stage == 3 else []
        self.head.eval()
        with torch.no_grad(), _deepspeed().zero.GatheredParameters(parameters, enabled=self.stage == 3):
            yield
        self.head.train()

    def masters(self) -> dict[str, Tensor]:
        """The head's state_dict on the CPU with float32 master weights, whole on every rank (a collective call)."""
        full = _deepspeed().utils.safe_get_full_fp32_param
        parameters = dict(self.head.named_parameters(remove_duplicate=False))
        state = {}
        for name, value in self.head.state_dict().items():
            state[name] = (full(parameters[name]) if name in parameters else value).detach().cpu().clone()
        return state

    def save(self, folder: Path) -> None:
        """Everything that a resume needs, bitwise on as many ranks (a collective call)."""
        self.ds.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)
        if dist.rank() == 0:
            for script in folder.parent.glob("zero_to_*.py"):  # recovery tools that it leaves; head.safetensors has what they would make
                script.unlink()

    def load(self, folder: Path, world: int) -> None:
        """Goes on from a folder that `world` ranks wrote (a collective call). Another number of ranks than now takes the way over
        DeepSpeed's universal format, written beside the folder and removed."""
        source = folder
        if world != dist.world():
            source = folder.with_name(folder.name + ".universal.partial")
            if dist.rank() == 0:
                _to_universal(folder, source)
            dist.barrier()
            self.ds._config.load_universal_checkpoint = True
        decays = [group["weight_decay"] for group in self.ds.optimizer.param_groups]
        path, _ = self.ds.load_checkpoint(str(source.parent), tag=source.name)
        assert path is not None, source
        if source != folder:
            self.ds._config.load_universal_checkpoint = False
            # What ZeRO 3's loader mixes up: it gives every group the first one's settings, and all groups one step counter.
            for group, decay in zip(self.ds.optimizer.param_groups, decays, strict=True):
                group["weight_decay"] = decay
            for state in self.ds.optimizer.optimizer.state.values():
                state["step"] = state["step"].clone()
            dist.barrier()
            if dist.rank() == 0:
                shutil.rmtree(source)


def _to_universal(folder: Path, out: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    settings = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ds_to_universal.main(argparse.Namespace(input_folder=str(folder), output_folder=str(out), **settings))
    (folder.parent / "latest_universal").unlink()
