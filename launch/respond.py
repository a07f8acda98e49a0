"""Prompts -> the target's own answers: `python launch/respond.py conf=<name>`. Resumable: the same command goes on."""

import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data.chat import load_tokenizer, prompt_ids  # noqa: E402
from data.engine import respond  # noqa: E402
from data.errors import UserError  # noqa: E402
from data.identity import identity  # noqa: E402
from data.prompts import read_prompts, select  # noqa: E402
from data.target import resolve  # noqa: E402
from train.config import RunConfig, main  # noqa: E402


def run(cfg: RunConfig) -> None:
    folder = Path(cfg.data.responses)
    folder.mkdir(parents=True, exist_ok=True)
    target_dir = resolve(cfg.target, ROOT)
    tokenizer = load_tokenizer(target_dir, cfg.target.trust_remote_code)
    prompts = read_prompts(cfg.data.prompts, folder / "quarantine.jsonl", ROOT)
    maker, sampling = identity(target_dir, cfg.target), asdict(cfg.data.sampling)
    samples, loops = sampling.pop("samples"), cfg.data.loop_ngram if cfg.data.cut_loops else 0
    meta = {**maker, "sampling": sampling, "cut_loops": loops}
    for split, limit, each in (("train", cfg.data.limit, samples), ("heldout", cfg.data.heldout_limit, 1)):
        records = [{**asdict(r), "prompt_ids": prompt_ids(tokenizer, r), "seed": 0} for r in select(prompts, split, limit)]
        if not records:
            raise UserError(f"data.prompts: no prompt for the split {split!r}; add records, or meta.split, or raise the limit")
        settings = {"target_dir": target_dir, "target_cfg": cfg.target, "max_model_len": cfg.target.max_model_len, "meta": meta}
        settings |= {"batch_size": cfg.data.batch_size, "cut_loops": loops, "sampling": {**sampling, "samples": each}}
        respond(records=records, out_path=folder / f"{split}.jsonl", **settings)


if __name__ == "__main__":
    main(run)
