"""Time to the first token and between tokens as a client sees them: python launch/latency.py conf=<name>. Serves each method of
eval.methods with vLLM's own server and measures it with vLLM's own benchmark. Writes <run_dir>/eval/latency.json."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.prompts import select
from data.selfprompt import read_given
from data.target import resolve
from eval.latency import latency
from train.config import ROOT, RunConfig, main


def run(cfg: RunConfig) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the server ends with us
    prompts = select(read_given(cfg, ROOT), "heldout", cfg.eval.limit)
    latency(cfg, resolve(cfg.target, ROOT), prompts)


if __name__ == "__main__":
    main(run, "target", "head", "data", "eval", "export")
