"""Runs drafts in real vLLM and records what its model class computed. A process of its own: python tests/engine_probe.py <job.json>

The job lists cases {name, target, folder, serving, overrides, prompt, truth}. For each it decodes `prompt` in process, records at every
pass the committed length, the drafts and their logits, and then overwrites the first m drafts with the true continuation, m = 0, 1, ..
k, 0, ..: so that every number of acceptances, and the rewriting of the draft's cache after each, is exercised. Writes <job>.pt.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

K = 3


def run(case: dict) -> dict:
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    speculative = case["serving"] | {"model": case["folder"], "num_speculative_tokens": K}
    llm = LLM(
        case["target"],
        speculative_config=speculative,
        hf_overrides=case["overrides"] or {},
        dtype="float32",
        max_model_len=256,
        max_num_seqs=1,
        max_num_batched_tokens=256,
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
        skip_tokenizer_init=True,
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    model, passes, logits = runner.drafter.model, [], []
    compute_logits, propose = model.compute_logits, GPUModelRunner.propose_draft_token_ids
    length, truth = len(case["prompt"]), case["truth"]

    def recorded_logits(*args, **kwargs):
        out = compute_logits(*args, **kwargs)
        logits.extend(x.clone() for x in (out if isinstance(out, list) else [out]))  # depth by depth, or all
        return out

    def recorded_propose(self, scheduler_output, sampled, *args, **kwargs):
        logits.clear()
        drafts = propose(self, scheduler_output, sampled, *args, **kwargs)
        committed = int(self.input_batch.num_tokens_no_spec[0])
        if isinstance(sampled, torch.Tensor):  # else the engine has counted the new tokens already
            committed += int(((sampled[0] >= 0) & (sampled[0] < self.input_batch.vocab_size)).sum())
        passes.append({"committed": committed, "drafts": drafts[0].tolist(), "logits": torch.cat(logits)[:K]})
        for i, token in enumerate(truth[committed - length :][: len(passes) % (K + 1)]):
            drafts[0, i] = token
        return drafts

    model.compute_logits, GPUModelRunner.propose_draft_token_ids = recorded_logits, recorded_propose
    try:
        sampling = SamplingParams(temperature=0, max_tokens=len(truth), ignore_eos=True, detokenize=False)
        output = llm.generate([{"prompt_token_ids": case["prompt"]}], sampling, use_tqdm=False)[0].outputs[0].token_ids
    finally:
        GPUModelRunner.propose_draft_token_ids = propose
    return {"passes": passes, "output": list(output)}


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    path = Path(sys.argv[1])
    torch.save({case["name"]: run(case) for case in json.loads(path.read_text())}, path.with_suffix(".pt"))
