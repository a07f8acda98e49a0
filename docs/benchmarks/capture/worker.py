"""One contender in a process of its own: `python worker.py '<json>'` answers {"ready": true} once it is built and warm, then to each line
on stdin {"seconds", "cpu"} of one pass over all sequences.

The settings: name (of CONTENDERS), job (what data.engine_worker.capture is told), dtype, batch (of transformers), folder, threads.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the engine prints goes to stderr

import torch

Pass = Callable[[int], None]  # of a number, from 0


def capture(settings: dict[str, Any], sequences: list[dict[str, Any]]) -> Pass:
    """Ours, until the states are on disk, each pass in the same store under new names."""
    from data import engine_worker

    llm = engine_worker.start_capture(settings["job"])

    def run(number: int) -> None:
        engine_worker.take_states(llm, settings["job"], [{**s, "id": f"{number}/{s['id']}"} for s in sequences])

    return run


def prefill(settings: dict[str, Any], sequences: list[dict[str, Any]]) -> Pass:
    """The engine alone, as anybody would call it: no states."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    from data import engine_worker

    llm = engine_worker.start(settings["job"] | {"states": False})
    prompts = [TokensPrompt(prompt_token_ids=s["token_ids"]) for s in sequences]
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def run(_: int) -> None:
        llm.generate(prompts, params, use_tqdm=False)

    return run


def stock(settings: dict[str, Any], sequences: list[dict[str, Any]]) -> Pass:
    """The engine with its own example connector, a file per sequence: what speculators extracts with. It needs CUDA streams; the CPU has
    none, so copy and write happen at once."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    from data import engine_worker

    folder = Path(settings["folder"]) / "stock"
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    method["draft_model_config"] = {"hf_config": {"eagle_aux_hidden_state_layer_ids": settings["job"]["connector"]["layer_ids"]}}
    transfer = {"kv_connector": "OnCpu", "kv_connector_module_path": "stock_connector", "kv_role": "kv_producer"}
    transfer["kv_connector_extra_config"] = {"shared_storage_path": str(folder)}
    llm = engine_worker.start(settings["job"], speculative_config=method, kv_transfer_config=transfer)
    prompts = [TokensPrompt(prompt_token_ids=s["token_ids"]) for s in sequences]
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def run(_: int) -> None:
        llm.generate(prompts, params, use_tqdm=False)
        shutil.rmtree(folder, ignore_errors=True)

    return run


def transformers(settings: dict[str, Any], sequences: list[dict[str, Any]]) -> Pass:
    """A forward pass with output_hidden_states, sequences of like length together and padded; nothing is written."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(settings["job"]["llm"]["model"], dtype=getattr(torch, settings["dtype"])).eval()
    decoder = model.get_decoder()
    ordered = sorted((s["token_ids"] for s in sequences), key=len)
    batches = []
    for i in range(0, len(ordered), settings["batch"]):
        rows = [torch.tensor(ids) for ids in ordered[i : i + settings["batch"]]]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        batches.append({"input_ids": ids, "attention_mask": mask})

    @torch.inference_mode()
    def run(_: int) -> None:
        for batch in batches:
            decoder(**batch, output_hidden_states=True, use_cache=False)

    return run


CONTENDERS = {f.__name__: f for f in (capture, prefill, stock, transformers)}


def answer(**values: object) -> None:
    print(json.dumps(values), file=answers, flush=True)


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    sequences = [json.loads(line) for line in (Path(settings["folder"]) / "sequences.jsonl").read_text().splitlines()]
    run = CONTENDERS[settings["name"]](settings, sequences)
    run(0)
    answer(ready=True)
    for number, _ in enumerate(sys.stdin, 1):
        wall, cpu = time.perf_counter(), time.process_time()
        run(number)
        answer(seconds=time.perf_counter() - wall, cpu=time.process_time() - cpu)


if __name__ == "__main__":
    main()
