"""Parameters and floating-point operations of a target, and what a decoder layer keeps for the backward pass, from dimensions alone."""

from __future__ import annotations

from heads.base import DraftHead, TargetSpec
from heads.layers import Attention
from heads.moe import MixtureOfExperts


def block_activations(spec: TargetSpec) -> int:
    """Numbers a row of a decoder layer with an MLP; see train.plan.memory."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return 5 * spec.hidden_size + 2 * q + 2 * kv + 3 * spec.intermediate_size


def head_activations(head: DraftHead) -> int:
    """Numbers a row of all decoder layers of a head."""
    layers = sum(block_activations(module.spec) for module in head.modules() if isinstance(module, Attention))
    experts = [module for module in head.modules() if isinstance(module, MixtureOfExperts)]
    return layers + sum(module.kept - 3 * module.spec.intermediate_size for module in experts)


def idle_parameters(head: DraftHead) -> int:
    """Of the experts of a head that a row does not meet."""
    return sum(module.idle for module in head.modules() if isinstance(module, MixtureOfExperts))


def frozen_parameters(spec: TargetSpec) -> int:
    return spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)


def target_parameters(spec: TargetSpec) -> int:
    """Of a target, but for biases, and norms and corrections inside of layers with experts."""
    return frozen_parameters(spec) + _layers(spec, met=False) + (2 * spec.num_layers + 1) * spec.hidden_size


def target_flops(spec: TargetSpec, length: int) -> float:
    """Floating-point operations of the target's layers per token: 2 per parameter that it meets, and attention over half of `length` on
    average."""
    return 2 * _layers(spec, met=True) + spec.num_layers * 4 * spec.num_heads * spec.head_dim * length / 2


def _layers(spec: TargetSpec, met: bool) -> int:
    """Parameters in the matrices of all layers: q, k, v and o; gate, up and down, or those of experts and their router. met: of the experts
    those alone that a token meets."""
    D, moe = spec.hidden_size, spec.moe
    attention, mlp = D * 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim, D * 3 * spec.intermediate_size
    if moe is None:
        return spec.num_layers * (attention + mlp)
    experts = (moe["chosen"] if met else moe["experts"]) + moe["shared"]
    mixture = D * moe["experts"] + experts * D * 3 * moe["expert_size"]
    return spec.num_layers * attention + moe["dense_layers"] * mlp + (spec.num_layers - moe["dense_layers"]) * mixture
