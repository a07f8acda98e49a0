"""Prompts -> the target's own answers: `python launch/respond.py conf=<name>`. Resumable: the same command goes on."""

import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.chat import all_prompt_ids, load_tokenizer
from data.engine import respond
from data.errors import UserError
from data.identity import identity
from data.lock import alone
from data.prompts import read_prompts, select
from data.selfprompt import with_own
from data.target import resolve
from train.config import ROOT, RunConfig, main


def run(cfg: RunConfig) -> None:
    folder, target_dir = Path(cfg.data.responses), resolve(cfg.target, ROOT)
    tokenizer = load_tokenizer(target_dir, cfg.target.trust_remote_code)
    prompts = read_prompts(with_own(cfg, target_dir, tokenizer), folder / "quarantine.jsonl", ROOT)
    sampling, loops = asdict(cfg.data.sampling), cfg.data.loop_ngram if cfg.data.cut_loops else 0
    samples = sampling.pop("samples")
    meta = {**identity(target_dir, cfg.target), "sampling": sampling, "cut_loops": loops}
    asked = {split: select(prompts, split, limit) for split, limit in (("train", cfg.data.limit), ("heldout", cfg.data.heldout_limit))}
    for split, records in asked.items():  # both before either is sampled, which may take hours
        if not records:
            raise UserError(f"data.prompts: no prompt for the split {split!r} among {len(prompts)}; add records, or give some meta.split")
    for split, each in (("train", samples), ("heldout", 1)):
        encoded = all_prompt_ids(tokenizer, asked[split])
        records = [{**asdict(r), "prompt_ids": encoded[r.id], "seed": 0} for r in asked[split] if r.id in encoded]
        settings = {"target_dir": target_dir, "target_cfg": cfg.target, "meta": meta, "batch_size": cfg.data.batch_size, "cut_loops": loops}
        with alone(folder, "data.responses"):
            respond(records=records, out_path=folder / f"{split}.jsonl", sampling={**sampling, "samples": each}, **settings)


if __name__ == "__main__":
    main(run)
