"""The newest checkpoint of a run as a folder that vLLM loads: python launch/export.py conf=<name>. Writes <run_dir>/export/vllm."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from data.files import bytes_text
from data.target import resolve
from eval.export import check_fingerprint, export_head, read_export, trained_head
from train.checkpoint import load_head, trained
from train.config import RunConfig, main


def export(cfg: RunConfig) -> None:
    run_dir = Path(cfg.run_dir)
    step, provenance = trained(run_dir, cfg.head)
    provenance["checkpoint"] = step.name
    target_dir = resolve(cfg.target, ROOT)
    check_fingerprint(provenance["target"]["fingerprint"], target_dir)
    head = trained_head(cfg.head, target_dir, load_head(step), torch.float32, "cpu")
    about = {"dtype": getattr(torch, cfg.target.dtype), "head_cfg": cfg.head, "k": max(cfg.eval.ks), "provenance": provenance}
    out = export_head(head, head.frozen, target_dir, run_dir / "export" / "vllm", **about, quantization=cfg.export.quantization)
    print(f"export: {step.name} -> {out}")
    if said := read_export(out).get("quantization"):
        print(f"export: {said['scheme']}, {bytes_text(said['bytes'])} instead of {bytes_text(said['bytes_without'])}")


if __name__ == "__main__":
    main(export, "target", "head", "export", "eval")
