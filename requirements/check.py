"""Fails with one line when the environment cannot run the project: a package that does not import, or one that must be absent."""

import importlib
import importlib.util
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

NEEDED = ("torch", "transformers", "datasets", "hydra", "deepspeed", "wandb", "vllm", "heads", "data", "train", "eval")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # their wheels on PyPI are built for CUDA and break next to a CPU torch

for name in NEEDED:
    try:
        importlib.import_module(name)
    except Exception as error:
        raise SystemExit(f"{name} does not import: {type(error).__name__}: {error}") from error
found = [name for name in UNWANTED if importlib.util.find_spec(name)]
if found:
    raise SystemExit(f"remove what does not belong here: .venv/bin/python -m pip uninstall -y {' '.join(found)}")
