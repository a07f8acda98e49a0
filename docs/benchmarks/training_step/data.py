"""Hidden states of real text that every contender trains on: the project's own prompts through the embedded target, float32.

python data.py OUT.pt      writes {"token_ids" [T], "taps" [T, 3, D], "last" [T, D] before the final norm, "norm" [D], "draft_ids" [U]}
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from transformers import AutoModelForCausalLM, AutoTokenizer

from data.prompts import read_prompts
from data.target import resolve
from train.config import load

TOKENS, PIECE, TAPS, U = 8192, 4096, (2, 15, 27), 8192


def main(out: str) -> None:
    folder = resolve(load(["conf=smollm_eagle3"]).target, ROOT)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "\n\n".join(message["content"] for record in read_prompts(["data/promptset"], ROOT) for message in record.messages)
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    frequent = torch.bincount(ids, minlength=model.config.vocab_size).argsort(descending=True, stable=True)[:U].sort().values
    token_ids = ids[:TOKENS].view(-1, PIECE)
    assert token_ids.numel() == TOKENS, f"the prompts have {len(ids)} tokens only"
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0][0]))
    taps = []
    with torch.no_grad():
        for row in token_ids:
            states = model.model(row[None], output_hidden_states=True).hidden_states
            taps.append(torch.stack([states[t][0] for t in TAPS], 1))
    torch.save(
        {
            "token_ids": token_ids.flatten(),
            "taps": torch.cat(taps),
            "last": torch.cat(last),
            "norm": model.model.norm.weight.detach(),
            "draft_ids": frequent,
            "target": str(folder),
        },
        out,
    )


if __name__ == "__main__":
    main(sys.argv[1])
