"""Rounded weights in an export, in the formats of the compressed-tensors library, which vLLM reads.

    int8   weights int8 with a scale per output row, inputs int8 with a scale per token (worked out as they come): GPUs, CPUs with VNNI
    int4   weights int4 with a scale per group of inputs, inputs as they are: GPUs, CPUs with AVX-512
    fp8    weights e4m3 with a scale per output row, inputs e4m3 with a scale per token: GPUs

Rounded are the projections of the layers, and `fc`, to nearest, from the checkpoint's float32. Norms, embeddings and lm_head stay, for
vLLM's draft classes share the last two with the target. No data is needed, and none is used. Shapes: N outputs, K inputs, G of a group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from data.commands import command
from data.errors import UserError

Shapes = dict[str, tuple[int, ...]]

# scheme -> (its name in the library, the format of its tensors, the dtype of the rounded weights)
SCHEMES = {
    "int8": ("W8A8", "int-quantized", torch.int8),
    "int4": ("W4A16", "pack-quantized", torch.int32),
    "fp8": ("FP8_DYNAMIC", "float-quantized", torch.float8_e4m3fn),
}
GROUPS = (128, 64, 32)  # sizes of a group that vLLM's kernels know; the largest that divides all inputs is taken
# vLLM's classes of these read the draft's own scheme. That of method mtp reads the target's, Medusa's and our plug-in's know none.
KNOWN = {
    ("eagle3", "LlamaForCausalLMEagle3"),
    ("eagle", "LlamaForCausalLM"),
    ("draft_model", "LlamaForCausalLM"),
    ("dflash", "DFlashDraftModel"),
}
LAYERS, FC = re.compile(r"(^|\.)(layers\.\d+|midlayer)\..*_proj\.weight$"), "fc.weight"


def check_scheme(scheme: str, method: str, architecture: str) -> None:
    """UserError: vLLM would not read rounded weights in a head that is served so."""
    if (method, architecture) not in KNOWN:
        known = ", ".join(sorted({m for m, _ in KNOWN}))
        raise UserError(
            f"export.quantization={scheme}: vLLM's class for this head ({architecture}, method {method}) reads no rounded weights of a "
            f"draft's own: leave it null. Heads that can be rounded are served by {known}"
        )


def check_device(scheme: str, dtype: str, on_gpu: bool, cpu: Mapping[str, Any]) -> None:
    """UserError: the engine (vLLM 0.32), which runs in `dtype`, cannot compute with it here. cpu: torch.cpu.get_capabilities()."""
    if on_gpu:
        return
    able = {  # scheme -> whether this CPU is, and what would be. Without VNNI oneDNN's int8 products saturate: wrong by tens of per cent
        "int8": (cpu["architecture"] != "x86_64" or cpu["avx512_vnni"] or cpu["avx_vnni"], "a CPU with VNNI"),
        "int4": (cpu["architecture"] == "x86_64" and cpu["avx512_f"], "a CPU with AVX-512"),
        "fp8": (False, "a GPU"),
    }
    here, where = able[scheme]
    if not here:
        raise UserError(
            f"this export holds {scheme} weights, with which vLLM cannot compute on this CPU: evaluate on {where}, or export again with "
            f"another export.quantization: `{command('export', 'export.quantization=null')}`"
        )
    tiles = cpu["architecture"] == "x86_64" and cpu["amx_tile"]  # there vLLM takes int8_scaled_mm_with_quant
    if dtype == "float32" and (scheme == "int4" or (scheme == "int8" and tiles)):
        raise UserError(
            f"this export holds {scheme} weights, which vLLM multiplies with bfloat16 alone on this CPU, and the engine runs in float32: "
            "set eval.dtype=bfloat16, or export again: `" + command("export", "export.quantization=null") + "`"
        )


def rounded_names(shapes: dict[str, Any]) -> list[str]:
    """Those of an export's tensors that are rounded. With a mask state `fc` is not: the engine runs it before it has prepared rounded
    weights."""
    return [name for name in shapes if LAYERS.search(name) or (name == FC and "mask_hidden" not in shapes)]


def rounded(tensors: dict[str, Tensor], scheme: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(what stands in the export in place of `rounded_names(tensors)`, config.json's quantization_config).

    tensors: the export's, at full precision. dtype: of the served target."""
    names = rounded_names(tensors)
    preset, layout, _ = SCHEMES[scheme]
    found = preset_name_to_scheme(preset, [r"re:.*layers\.\d+\..*_proj$", *([r"re:.*fc$"] if FC in names else [])])
    assert found.weights is not None
    if scheme == "int4":
        found.weights.group_size = _group_size({tensors[name].shape[1] for name in names})
    out: dict[str, Tensor] = {}
    for name in names:
        out |= _rounded_one(name.removesuffix("weight"), tensors[name].detach().cpu().float(), found, dtype)
    config = QuantizationConfig(
        config_groups={"group_0": found}, format=layout, quantization_status=QuantizationStatus.COMPRESSED, ignore=[]
    )
    return out, config.model_dump(mode="json", exclude_none=True)


def _group_size(inputs: set[int]) -> int:
    for size in GROUPS:
        if all(n % size == 0 for n in inputs):
            return size
    raise UserError(f"export.quantization=int4: {sorted(inputs)} inputs are no multiples of {GROUPS[-1]}, the smallest group: take int8")


def _rounded_one(prefix: str, weight_NK: Tensor, scheme: QuantizationScheme, dtype: torch.dtype) -> dict[str, Tensor]:
    args = scheme.weights
    assert args is not None
    packed, size = args.num_bits == 4, args.group_size or weight_NK.shape[1]
    groups = weight_NK.unflatten(1, (-1, size))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)  # [N, K/G]
    if packed:  # the engine reads these scales in its own dtype: round with what it will read
        scale = scale.to(dtype)
    q_NK = quantize(weight_NK, scale.float(), zero, args, dtype=torch.int8 if args.type == "int" else torch.float8_e4m3fn)
    if not packed:
        return {f"{prefix}weight": q_NK.contiguous(), f"{prefix}weight_scale": scale.contiguous()}
    shape = torch.tensor(weight_NK.shape)
    return {f"{prefix}weight_packed": pack_to_int32(q_NK, 4), f"{prefix}weight_scale": scale.contiguous(), f"{prefix}weight_shape": shape}


def stored(shapes: Shapes, config: dict[str, Any]) -> tuple[Shapes, dict[str, torch.dtype]]:
    """What stands in an export whose config has a quantization_config, in place of what vLLM's class reads without one: name -> shape,
    and the dtypes that are not the config's own."""
    layout, weights = config["quantization_config"]["format"], config["quantization_config"]["config_groups"]["group_0"]["weights"]
    kind = next(dtype for _, known, dtype in SCHEMES.values() if known == layout)
    shapes, dtypes = dict(shapes), {}
    for name in rounded_names(shapes):
        prefix, (rows, columns) = name.removesuffix("weight"), shapes.pop(name)
        if layout == "pack-quantized":
            shapes |= {f"{prefix}weight_packed": (rows, columns // 8), f"{prefix}weight_shape": (2,)}
            shapes[f"{prefix}weight_scale"] = (rows, columns // weights["group_size"])
            dtypes |= {f"{prefix}weight_packed": kind, f"{prefix}weight_shape": torch.int64}
        else:
            shapes |= {name: (rows, columns), f"{prefix}weight_scale": (rows, 1)}
            dtypes |= {name: kind, f"{prefix}weight_scale": torch.float32}
    return shapes, dtypes


def size_of(tensors: dict[str, Tensor]) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
