"""One EAGLE-3 optimizer step of Draftsmith and of each peer, on the same hidden states, all of them from their own public parts.

build_<name>(Job) returns a function that takes one step. Nothing inside a peer's package is edited; what each needs from outside
is said at its place. Same work: one layer, taps 2, 15, 27, K depths, every listed token supervised, lm_head trained, AdamW, clipping at 1.
"""

from __future__ import annotations

import importlib.machinery
import json
import shutil
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

D, INTER, V, HEADS, KV, SIZE, TAPS = 576, 1536, 49152, 9, 3, 64, [2, 15, 27]
LLAMA = {"num_hidden_layers": 1, "intermediate_size": INTER, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": SIZE}
ROPE = {"rope_type": "default", "rope_theta": 100000.0}


@dataclass
class Job:
    sequences: int  # B
    length: int  # S
    depths: int  # K
    draft_vocab: int  # U
    dtype: torch.dtype
    supervised: float  # share of each sequence, its end, that has labels
    data: dict[str, Any]
    compile: bool = True  # ours; the peers' own switches are as they are usually run

    def rows(self, name: str) -> torch.Tensor:
        """[B, S, ...] of the data, states in the compute dtype."""
        x = self.data[name][: self.sequences * self.length].unflatten(0, (self.sequences, self.length))
        return x.to(self.dtype) if x.is_floating_point() else x

    def normed_last(self) -> torch.Tensor:
        x = self.rows("last").float()
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.data["norm"]).to(self.dtype)

    def mask(self) -> torch.Tensor:
        """[B, S] bool: tokens that are labels."""
        return torch.arange(self.length).expand(self.sequences, -1) >= self.length - round(self.supervised * self.length)

    def autocast(self) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.dtype == torch.bfloat16 else nullcontext()


def build_draftsmith(job: Job) -> Callable[[], object]:
    """The engine that launch/train.py runs: DeepSpeed, ZeRO 2, one rank."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from data.target import frozen, spec
    from heads import build
    from heads.base import Batch
    from heads.kernels import compile_passes
    from train import dist
    from train.config import load
    from train.engine import Engine

    folder = Path(job.data["target"])
    words = [f"head.taps={TAPS}", f"head.depths={job.depths}", "head.train_lm_head=true", "head.fc_norm=false", "head.norm_output=false"]
    cfg = load(["conf=smollm_eagle3", "optim=cosine", "zero=stage2", *words])
    cfg.train.dtype = str(job.dtype).removeprefix("torch.")
    cfg.head["draft_vocab_size"] = job.draft_vocab if job.draft_vocab < V else None
    dist.start(torch.get_num_threads())
    compile_passes(on=job.compile)
    torch.manual_seed(0)
    head = build(cfg.head, spec(folder))
    if job.draft_vocab < V:
        head.set_draft_vocab(job.data["draft_ids"])
    parts = frozen(folder, job.dtype, "cpu")
    head.attach(parts)
    head.start_from(parts)
    engine = Engine(head, cfg)
    offsets = torch.arange(job.sequences + 1) * job.length
    mask = job.mask().clone()
    mask[:, 0] = False
    flat = (job.rows(name).flatten(0, 1) for name in ("token_ids", "taps"))
    token_ids, taps = flat
    batch = Batch(token_ids, mask.flatten(), offsets, taps, job.normed_last().flatten(0, 1))
    total = head.count(batch)
    return lambda: engine.backward(batch, total)


def build_speculators(job: Job) -> Callable[[], object]:
    """speculators 0.9: its model, its optimizers, the body of its Trainer's loop. loss_implementation="eager": the fused one is Triton."""
    from speculators.models.eagle3 import core
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig

    target, (B, S) = job.data["target"], (job.sequences, job.length)
    torch.manual_seed(0)
    t2d, d2t = _maps(job)
    settings: dict[str, Any] = {
        "verifier_name_or_path": target, "draft_vocab_size": job.draft_vocab, "norm_before_residual": True, "ttt_steps": job.depths,
        "ttt_step_loss_decay": 1.0, "draft_attn_impl": "sdpa", "loss_fn": "kl_div", "loss_implementation": "eager",
        "target_layer_ids": TAPS,
    }  # fmt: skip
    config = create_transformer_layer_config(target, 1, "llama", None, 8192, [0])
    model = core.Eagle3DraftModel.from_training_args(config, t2d=t2d, d2t=d2t, **settings).train()
    step_settings, _ = core.Eagle3DraftModel.get_trainer_kwargs(**settings)
    model.lm_head.weight.requires_grad_(True)  # frozen by its default; trained by all others
    optimizers = build_optimizers(model, TrainerConfig(lr=1e-4, num_epochs=1, save_path="unused"))
    batch = {
        "hidden_states": job.rows("taps").reshape(1, B * S, -1),
        "input_ids": _shifted(job.rows("token_ids")).reshape(1, -1),
        "verifier_last_hidden_states": _shifted(job.rows("last")).reshape(1, B * S, D),
        "loss_mask": _shifted(job.mask()).reshape(1, -1),
        "position_ids": (1 + torch.arange(S)).repeat(B)[None],
        "document_ids": torch.arange(B).repeat_interleave(S)[None],
    }

    def step() -> None:
        with job.autocast():
            _, loss, _ = model(**batch, **step_settings)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    return step


def build_specforge(job: Job) -> Callable[[], object]:
    """SpecForge 0.2: its draft model, online model, offline strategy and optimizer. It imports triton for its loss kernel, which does not
    run on a CPU: the package's own reference formula stands in. torch.compile off: with it the first steps take minutes."""
    loss, model_module = _specforge_modules()
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.optimizer import BF16Optimizer
    from specforge.training.strategies.base import Eagle3TrainStrategy
    from transformers import LlamaConfig

    torch.manual_seed(0)
    model_module.LogSoftmaxLoss = type("Reference", (), {"apply": staticmethod(loss._compute_loss)})
    config = LlamaConfig(
        vocab_size=V, hidden_size=D, hidden_act="silu", rms_norm_eps=1e-5, max_position_embeddings=8192, rope_parameters=ROPE,
        tie_word_embeddings=False, pad_token_id=2, pretraining_tp=1, **LLAMA,
    )  # fmt: skip
    config.draft_vocab_size = job.draft_vocab
    folder = _untied_copy(job)
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa").to(job.dtype)
    draft.load_embedding(folder, "model.embed_tokens.weight")
    draft.freeze_embedding()
    if job.draft_vocab < V:
        t2d, d2t = _maps(job)
        draft.t2d.copy_(t2d)
        draft.d2t.copy_(d2t)
    model = model_module.OnlineEagle3Model(draft, length=job.depths, attention_backend="sdpa").train()
    strategy = Eagle3TrainStrategy(model, target_head=TargetHead.from_pretrained(folder).to(job.dtype), compact_teacher=False)
    optimizer = BF16Optimizer(draft, lr=1e-4, total_steps=1000)
    tensors = {
        "input_ids": job.rows("token_ids").clone(),
        "attention_mask": torch.ones(job.sequences, job.length, dtype=torch.long),
        "loss_mask": job.mask().long(),
        "hidden_state": job.rows("taps").flatten(2).contiguous(),
        "target": job.normed_last(),
    }
    batch = types.SimpleNamespace(tensors=tensors, metadata={"target_repr": "hidden_state"})

    def step() -> None:
        with torch.compiler.set_stance("force_eager"):
            strategy.forward_loss(batch).loss.backward()
            optimizer.step()

    return step


def build_modelopt(job: Job) -> Callable[[], object]:
    """Model-Optimizer 0.47: its offline mode (embeddings and lm_head alone), torch's AdamW. One shim: transformers 5.19 builds rotary
    embeddings without a device argument."""
    import modelopt.torch.speculative as mtsp
    import modelopt.torch.speculative.plugins.modeling_eagle as eagle
    from modelopt.torch.speculative.plugins.modeling_fakebase import FakeBaseModel

    rotary = eagle.LlamaRotaryEmbedding
    eagle.LlamaRotaryEmbedding = lambda config, device=None: rotary(config)
    torch.manual_seed(0)
    model = FakeBaseModel.from_source(job.data["target"])
    architecture = LLAMA | {
        "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [t - 1 for t in TAPS], "use_last_layernorm": True,
        "has_lm_head": True, "draft_vocab_size": job.draft_vocab, "hidden_act": "silu", "rope_scaling": ROPE, "rope_theta": 100000.0,
        "_attn_implementation": "sdpa",
    }  # fmt: skip
    config = {
        "eagle_offline": True,
        "eagle_architecture_config": architecture,
        "eagle_ttt_steps": job.depths,
        "eagle_decoder_type": "llama",
    }
    mtsp.convert(model, [("eagle", config | {"eagle_use_torch_compile": False})])
    if job.draft_vocab < V:
        model.eagle_module.d2t.copy_(_maps(job)[1])
    model.eagle_module.lm_head.weight.data.normal_(0, 0.02)
    model.to(job.dtype).train()
    model._base_llm_config.dtype = job.dtype  # of the attention mask
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    states = {"base_model_hidden_states": job.normed_last(), "aux_hidden_states": job.rows("taps").flatten(2).contiguous()}
    batch = {
        "input_ids": job.rows("token_ids").clone(),
        "attention_mask": torch.ones(job.sequences, job.length, dtype=torch.long),
        "base_model_outputs": states,
    }
    if job.supervised < 1:
        batch["loss_mask"] = job.mask().long()

    def step() -> None:
        with job.autocast():
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _maps(job: Job) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """t2d [V] bool and d2t [U] offsets, as all three peers want them; none for the whole vocabulary."""
    if job.draft_vocab == V:
        return None, None
    ids = job.data["draft_ids"]
    return torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True), ids - torch.arange(len(ids))


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """Each sequence one place to the left, its last entry twice."""
    return torch.cat([x[:, 1:], x[:, -1:]], 1)


def _untied_copy(job: Job) -> str:
    """SpecForge wants an index of the shards and an lm_head of its own."""
    source, folder = Path(job.data["target"]), Path(job.data["target"]).with_name("smollm2-untied")
    if not (folder / "config.json").exists():
        folder.mkdir(exist_ok=True)
        with safe_open(source / "model.safetensors", "pt") as f:
            weight = f.get_tensor("model.embed_tokens.weight")
        names = ("lm_head.weight", "model.embed_tokens.weight")
        save_file({name: weight.clone() for name in names}, folder / "model.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(source / "config.json", folder / "config.json")
    return str(folder)


def _specforge_modules() -> tuple[Any, Any]:
    """Imports its loss and model with a stand-in for triton, which is taken away again before torch looks for it."""
    import torch._inductor.runtime.triton_compat
    import torch.utils._triton
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.utils._triton.has_triton_package()
    names = ("triton", "triton.language")
    fake = {name: types.ModuleType(name) for name in names if name not in sys.modules}
    for name, module in fake.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    if fake:
        fake["triton"].__dict__.update(jit=lambda f=None, **_: f or (lambda g: g), language=fake["triton.language"], __version__="3.0.0")
        fake["triton"].__dict__.update(next_power_of_2=lambda n: 1 << (n - 1).bit_length())
        fake["triton.language"].__dict__.update(constexpr=object, dtype=type("dtype", (), {}))
    sys.modules.update(fake)
    try:
        import specforge.algorithms.eagle3.model as model
        import specforge.core.loss as loss
    finally:
        for name in fake:
            del sys.modules[name]
    return loss, model
