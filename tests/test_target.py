"""The target's folder: built-in targets against an independent engine, config styles, sharded weights, and what is refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import refused
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import builtin
from data.target import final_norm, fingerprint, frozen, resolve, spec, spec_from_config
from heads.base import TargetSpec
from heads.target import Moe
from train.config import TargetConfig, load

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2_llamacpp.json").read_text(encoding="utf-8"))
# llama.cpp multiplies in 8-bit blocks, we in float32 from bf16-rounded weights: where the two best logits are closer than this, either
# may win. A tensor permuted wrongly moves logits by whole units.
NEAR_TIE = 0.25
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    return resolve(load(["conf=smollm_mtp"]).target, tmp_path_factory.mktemp("root"))  # compares the dimensions of the conf, too


@pytest.fixture
def tiny(tmp_path):
    return resolve(TargetConfig(model="builtin:tiny"), tmp_path)


def test_smollm2_tokenises_as_llama_cpp_does(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for piece in GOLDEN["pieces"]:
        assert tokenizer.encode(piece["text"]) == piece["ids"]
        assert tokenizer.decode(piece["ids"]) == piece["text"]
    for case in GOLDEN["greedy"]:
        chat = [{"role": "user", "content": case["prompt"]}]
        assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == case["prompt_ids"]


def test_smollm2_answers_as_llama_cpp_does(smollm2):
    """At every position of llama.cpp's own greedy answers its token is our best one too, or (rarely) within a near-tie of it."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    gaps = []
    for case in GOLDEN["greedy"]:
        prompt, answer = case["prompt_ids"], torch.tensor(case["greedy_ids"])
        with torch.no_grad():
            logits_TV = model(torch.tensor([prompt + case["greedy_ids"]])).logits[0, len(prompt) - 1 : -1]
        gaps.append(logits_TV.max(-1).values - logits_TV.gather(1, answer[:, None])[:, 0])
    gap = torch.cat(gaps)
    assert len(gap) >= 200
    assert gap.max() < NEAR_TIE
    assert (gap == 0).float().mean() > 0.95


def test_smollm2_folder_carries_its_licence_and_fits_its_conf(smollm2):
    assert "Apache License 2.0" in (smollm2 / "README.md").read_text(encoding="utf-8")
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2
    parts = frozen(smollm2, torch.bfloat16, "cpu")
    assert parts.embed_VD is parts.lm_head_VD and parts.embed_VD.shape == (49152, 576)


def test_tiny_is_the_same_everywhere_and_generates(tiny, tmp_path):
    again = resolve(TargetConfig(model="builtin:tiny"), tmp_path / "elsewhere")
    assert fingerprint(tiny) == fingerprint(again)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == 512
    assert tokenizer.decode(tokenizer.encode("Hello, wörld 12!")) == "Hello, wörld 12!"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    out = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :]
    assert len(set(out.tolist())) > 4, "a target that repeats one token tests nothing"


def test_ranks_that_start_together_build_one_whole_folder(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: resolve(TargetConfig(model="builtin:tiny"), tmp_path), range(4)))
    assert len(folders) == 1
    assert [p.name for p in (tmp_path / "store" / "targets").iterdir()] == ["tiny"]


def test_interrupted_build_leaves_no_target(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(builtin, "save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        resolve(TargetConfig(model="builtin:tiny"), tmp_path)
    assert not (tmp_path / "store" / "targets" / "tiny").exists()


def test_frozen_parts_equal_the_models_own(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    parts = frozen(tiny, torch.float32, "cpu")
    assert torch.equal(parts.embed_VD, model.get_input_embeddings().weight)
    assert torch.equal(parts.lm_head_VD, model.get_output_embeddings().weight)
    assert torch.equal(final_norm(tiny), model.model.norm.weight)


def test_sharded_weights_read_like_one_file(tiny, tmp_path):
    before = frozen(tiny, torch.float32, "cpu")
    tensors = load_file(tiny / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        file = f"model-{i + 1:05d}-of-00003.safetensors"
        save_file({n: tensors[n] for n in names[i::3]}, tiny / file)
        weight_map |= dict.fromkeys(names[i::3], file)
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    after = frozen(tiny, torch.float32, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(vars(before).values(), vars(after).values(), strict=True))


def test_fingerprint_sees_one_changed_weight_and_config(tiny):
    first = fingerprint(tiny)
    tensors = load_file(tiny / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, tiny / "model.safetensors", metadata={"format": "pt"})
    second = fingerprint(tiny)
    (tiny / "config.json").write_text((tiny / "config.json").read_text().replace("1e-05", "1e-06"))
    assert len({first, second, fingerprint(tiny)}) == 3


@pytest.mark.parametrize(
    ("keys", "theta", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, LLAMA3),
        ({"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, 5e5, LLAMA3),
        ({"rope_theta": 1e4, "rope_scaling": None}, 1e4, None),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0}},
            1e4,
            {"rope_type": "yarn", "factor": 4.0},
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                }
            },
            1e6,
            {"rope_type": "linear", "factor": 8.0},
        ),
    ],
)
def test_rope_of_transformers_4_and_5(tiny, keys, theta, scaling):
    config = json.loads((tiny / "config.json").read_text())
    del config["rope_theta"]
    (tiny / "config.json").write_text(json.dumps(config | keys))
    found = spec(tiny)
    assert (found.rope_theta, found.rope_scaling) == (theta, scaling)


def test_spec_fills_what_older_configs_leave_out(tiny):
    config = json.loads((tiny / "config.json").read_text())
    for key in ("head_dim", "num_key_value_heads", "tie_word_embeddings"):
        del config[key]
    (tiny / "config.json").write_text(json.dumps(config))
    found = spec(tiny)
    assert (found.head_dim, found.num_kv_heads, found.tied_embeddings) == (32, 2, False)


def test_spec_of_a_multimodal_config_is_its_text_part(tiny):
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({"model_type": "some_vlm", "tie_word_embeddings": False, "text_config": config}))
    assert spec(tiny).hidden_size == 64


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(tiny, name):
    (tiny / name).unlink()
    refused(lambda: resolve(TargetConfig(model=str(tiny)), Path("/")), str(tiny), Path(name).suffix if "model" in name else name)


def test_wrong_folder_and_wrong_builtin_are_named(tmp_path):
    refused(lambda: resolve(TargetConfig(model="./nowhere"), tmp_path), "./nowhere", "no such folder")
    refused(lambda: resolve(TargetConfig(model="builtin:huge"), tmp_path), "builtin:huge", "builtin:smollm2", "builtin:tiny")


def test_hub_target_without_a_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refused(
        lambda: resolve(TargetConfig(model="meta-llama/Llama-3.1-8B-Instruct"), tmp_path), "target.model=/path/to/folder", "hf auth login"
    )


def test_conf_that_contradicts_the_target_is_refused(tiny):
    stated = {f: getattr(spec(tiny), f) for f in TargetSpec.__dataclass_fields__}
    assert resolve(TargetConfig(model=str(tiny), spec=stated), Path("/")) == tiny
    wrong = TargetConfig(model=str(tiny), spec=stated | {"num_layers": 30})
    refused(lambda: resolve(wrong, Path("/")), "num_layers: conf 30, target 2", "config.json")


@pytest.mark.parametrize("moe", [{"experts": 4, "chosen": 2}, [4, 2], dict.fromkeys(Moe.__annotations__, 1) | {"chosen": 2}])
def test_experts_that_a_conf_states_in_part_are_refused(moe):
    stated = load(["conf=tiny_glm4_moe_mtp"]).target
    stated.spec = stated.spec | {"moe": moe}
    refused(lambda: spec_from_config(stated), "target.spec", "moe", "experts")


def test_spec_in_a_conf_names_unknown_and_missing_keys():
    refused(lambda: spec_from_config(TargetConfig(model="x", spec={"hidden": 3})), "unknown hidden", "hidden_size")
    refused(lambda: spec_from_config(TargetConfig(model="x", spec={"hidden_size": 3})), "num_layers", "vocab_size")


def test_broken_weights_and_config_are_named(tiny):
    good = (tiny / "model.safetensors").read_bytes()
    (tiny / "model.safetensors").write_bytes(good[:1000])
    refused(lambda: frozen(tiny, torch.float32, "cpu"), "model.safetensors", "unreadable")
    (tiny / "config.json").write_text('{"hidden_size": 64,\n oops')
    refused(lambda: spec(tiny), "config.json:2", "not valid JSON")
    (tiny / "config.json").write_text("{}")
    refused(lambda: spec(tiny), "config.json", "`num_attention_heads`")
