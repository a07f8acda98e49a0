"""The target in the real engine: answers, captured states and measured decoding of a tiny random Llama."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data import engine_job
from data.answers import Request, check_meta, unanswered
from data.builtin import build_tiny
from data.chat import loop_start
from data.engine import capture, generate, respond
from data.engine_job import LoopWatch, cache_plan, llm_settings, run_child, stop_ids
from data.errors import UserError
from data.prompts import read_jsonl_tolerant
from data.store import Store
from data.target import spec
from train.config import TargetConfig

ROOT = Path(__file__).resolve().parents[1]
TAPS, DEPTH = (0, 1), 2
SAMPLING = {"temperature": 0.8, "top_p": 1.0, "top_k": 50, "max_tokens": 24, "samples": 2, "greedy": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in tiny target with a final norm that is not all ones, so that a forgotten weight shows."""
    folder = build_tiny(tmp_path_factory.mktemp("target") / "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.linspace(0.5, 1.5, 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config(target: Path, dtype: str = "float32") -> TargetConfig:
    return TargetConfig(model=str(target), dtype=dtype, max_model_len=512)


def prompts(n: int, length: int = 12) -> list[dict[str, Any]]:
    """Records of random ids, each of another length."""
    gen = torch.Generator().manual_seed(0)
    ids = [torch.randint(10, 500, (length + i,), generator=gen).tolist() for i in range(n)]
    return [{"id": f"r{i}", "messages": [], "meta": {}, "prompt_ids": x, "seed": 0} for i, x in enumerate(ids)]


def answer(target: Path, out: Path, records: list[dict[str, Any]], cut_loops: int = 0, **sampling: Any) -> dict[str, Any]:
    request = {"target_dir": target, "target_cfg": config(target), "records": records, "out_path": out, "batch_size": 4}
    return respond(Request(**request, sampling={**SAMPLING, **sampling}, cut_loops=cut_loops, meta={"target": "tiny"}, asks={}))


def write_responses(path: Path, n: int, prompt: int, response: int) -> Path:
    """Responses of random ids: capture does not care who wrote them."""
    lines = [
        {"id": f"{r['id']}#0", "prompt_ids": r["prompt_ids"][:prompt], "response_ids": r["prompt_ids"][prompt:], "finish_reason": "stop"}
        for r in prompts(n, prompt + response)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def take(  # noqa: PLR0913
    target: Path, responses: Path, store: Path, dtype: str = "float32", taps: tuple[int, ...] = TAPS, last: str = "all", **more: Any
) -> dict[str, Any]:
    manifest = {"target": {"fingerprint": "f"}, "tokenizer_hash": "t", "template_hash": "t", "engine": {"name": "vllm"}}
    manifest |= {"taps": list(taps), "hidden_size": 64, "last": last, "dtype": dtype}
    settings = {"taps": taps, "last": last, "max_length": 200, "cap_gb": 1.0, **more}
    return capture(target_dir=target, target_cfg=config(target, dtype), responses=responses, store_dir=store, manifest=manifest, **settings)


def sequences(store: Path, taps: tuple[int, ...] = TAPS) -> dict[str, dict[str, Any]]:
    opened = Store(store, verify=True)
    return {name: opened.get(i, taps) for i, name in enumerate(opened.ids)}


# --- without an engine


def test_loop_watch_equals_loop_start_token_by_token() -> None:
    gen = torch.Generator().manual_seed(1)
    for n in (1, 2, 3):
        for _ in range(200):
            ids = torch.randint(0, 4, (int(torch.randint(1, 20, (), generator=gen)),), generator=gen).tolist()
            watch = LoopWatch(n)
            found = next((cut for end in range(1, len(ids) + 1) if (cut := watch.cut(ids[:end])) is not None), None)
            assert found == loop_start(ids, n)
            assert LoopWatch(n).cut(ids) == found  # several tokens at once


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    out = tmp_path / "train.jsonl"
    check_meta(out, {"target": "a", "sampling": {"temperature": 0.8}})
    check_meta(out, {"target": "a", "sampling": {"temperature": 0.8}})
    with pytest.raises(UserError, match=r"sampling: .*0\.8.*0\.7.*data\.responses"):
        check_meta(out, {"target": "a", "sampling": {"temperature": 0.7}})


def test_answers_without_a_maker_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"train\.meta\.json"):
        check_meta(tmp_path / "train.jsonl", {"target": "a"})


def test_long_prompts_are_listed_and_a_cut_last_line_is_removed(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "train.jsonl"
    check_meta(out, {"target": "tiny"})
    whole = {"id": "r0#0", "prompt_ids": prompts(1)[0]["prompt_ids"], "response_ids": [1], "finish_reason": "stop"}
    out.write_text(json.dumps(whole) + "\n" + '{"id": "r0#1", "resp')
    long = {**prompts(1)[0], "id": "long", "prompt_ids": [11] * 512}
    result = answer(target, out, [*prompts(1), long], samples=1)
    assert result["answers"] == 1 and out.read_text() == json.dumps(whole) + "\n"
    assert "1 of 2 prompts" in capsys.readouterr().out
    assert json.loads((tmp_path / "train.quarantine.jsonl").read_text())["id"] == "long"


def test_a_resume_goes_by_ids_not_by_the_number_of_lines(tmp_path: Path) -> None:
    """Answers are written in the order in which they end, which is not that of the prompts."""
    records = prompts(3)
    done = {name: records[int(name[1])]["prompt_ids"] for name in ("r2#0", "r0#1", "r1#1")}
    todo = unanswered(records, 2, done, tmp_path)
    assert [r["id"] for r in todo] == ["r0#0", "r1#0", "r2#1"] and todo[1]["prompt_ids"] == records[1]["prompt_ids"]
    with pytest.raises(UserError, match=r"r1#0 and 0 more answer other prompts.*data\.responses"):
        unanswered(records, 2, {**done, "r1#0": [11, 12]}, tmp_path)


def test_a_method_is_never_left_to_the_engine_to_guess(target: Path) -> None:
    settings = {"target_dir": target, "target_cfg": config(target), "prompts": [], "hf_overrides": None, "dtype": "float32"}
    with pytest.raises(AssertionError, match="guesses a missing method"):
        generate(speculative={"model": "eagle-x", "num_speculative_tokens": 3}, concurrency=1, max_model_len=64, **settings)


def test_stop_ids_are_those_of_every_file(target: Path, tmp_path: Path) -> None:
    assert stop_ids(target)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert stop_ids(tmp_path) == [2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 9, "content": "<end>"}, {"id": 3, "content": "<pad>"}]}')
    assert stop_ids(tmp_path) == [5, 7, 9]
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="eos_token_id"):
        stop_ids(tmp_path)


def test_cache_plan_counts_a_pool_block_for_each_block_of_states(target: Path) -> None:
    llm = llm_settings(target, config(target), dtype="float32", max_model_len=257, seqs=1, compiled=False)
    dims, block = spec(target), 16 if torch.cuda.is_available() else 128
    pool = 2 * block * 2 * 32 * 4  # layers x tokens x (key and value) x head size x bytes
    plain = cache_plan(dims, llm, tokens=257, layers=2)
    assert plain["cache_need"] == plain["cache_least"] == (257 // block + 2) * pool
    states = cache_plan(dims, llm, tokens=257, layers=2, hidden_states=1)  # 256 bytes of states and of key + value per token and layer
    assert states["cache_need"] == 2 * plain["cache_need"]


def test_a_missing_engine_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_job.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="vllm is not installed: make setup"):
        run_child({}, [], "respond", 0, "answers")


def test_capture_refuses_a_store_over_the_cap_before_the_engine_starts(target: Path, tmp_path: Path) -> None:
    responses = write_responses(tmp_path / "train.jsonl", 4, 10, 20)
    with pytest.raises(UserError, match=r"data\.max_store_gb"):
        take(target, responses, tmp_path / "store", cap_gb=1e-6)
    assert not (tmp_path / "store").exists()


# --- with the engine


@pytest.mark.slow
def test_a_dead_engine_shows_its_last_lines(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_job.tempfile, "tempdir", str(tmp_path))  # the log is kept
    job = {"task": "no such task", "llm": llm_settings(target, config(target), dtype="float32", max_model_len=64, seqs=1, compiled=False)}
    with pytest.raises(UserError, match=r"exit code 1.*\n(.*\n)*.*KeyError: 'no such task'"):
        run_child(job, [], "respond", 0, "answers")


def test_captured_states_are_those_of_transformers(target: Path, tmp_path: Path) -> None:
    responses = write_responses(tmp_path / "train.jsonl", 12, 20, 170)  # more than one engine step, some over max_length
    counts = take(target, responses, tmp_path / "store", in_flight=5)
    assert counts["sequences"] == 12 and counts["cut"] == 1 and counts["left_out"] == 0
    stored = sequences(tmp_path / "store")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    answers, _ = read_jsonl_tolerant(responses)
    assert set(stored) == {a["id"] for a in answers}
    for a in answers:
        found, ids = stored[a["id"]], (a["prompt_ids"] + a["response_ids"])[:200]
        assert found["token_ids"].tolist() == ids
        assert found["loss_mask"].tolist() == [i >= 20 for i in range(len(ids))]
        with torch.no_grad():
            want = model(torch.tensor([ids]), output_hidden_states=True)
        for column, tap in enumerate(TAPS):
            torch.testing.assert_close(found["taps"][:, column], want.hidden_states[tap][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["last"], want.hidden_states[DEPTH][0], rtol=1e-5, atol=1e-5)
        assert (found["last"] @ model.lm_head.weight.T).argmax(-1).equal(want.logits[0].argmax(-1))
    take(target, responses, tmp_path / "alone", in_flight=1)
    for name, found in sequences(tmp_path / "alone").items():
        for key in ("taps", "last"):
            torch.testing.assert_close(found[key], stored[name][key], rtol=1e-5, atol=1e-5)


def test_captured_likeliest_tokens_are_those_of_transformers(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From several records in flight, longer ones in parts."""
    responses = write_responses(tmp_path / "train.jsonl", 6, 20, 150)
    take(target, responses, tmp_path / "store", taps=(1,), last="top9", in_flight=4)
    model, stored, tails = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), sequences(tmp_path / "store", (1,)), []
    for found in stored.values():
        with torch.no_grad():
            best = model(found["token_ids"][None]).logits[0, 19:-1].log_softmax(-1).topk(9)
        torch.testing.assert_close(found["top_log_p"][19:-1], best.values, rtol=1e-4, atol=1e-4)
        ties = best.values.diff(dim=1).abs() < 1e-4
        assert found["last"] is None and ((found["top_ids"][19:-1] == best.indices).all(1) | ties.any(1)).all()
        tails.append(1 - best.values.exp().sum(-1))
    assert f"tail mass {torch.cat(tails).mean():.1%} on average" in capsys.readouterr().out


def test_bfloat16_states_are_normed_as_the_model_norms_them(target: Path, tmp_path: Path) -> None:
    take(target, write_responses(tmp_path / "train.jsonl", 3, 10, 40), tmp_path / "store", dtype="bfloat16", taps=(0, DEPTH))
    norm = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).model.norm
    for found in sequences(tmp_path / "store", (DEPTH,)).values():
        with torch.no_grad():
            assert found["last"].equal(norm(found["taps"][:, 0]))


def test_answers_are_the_targets_own_resume_and_end_at_loops(target: Path, tmp_path: Path) -> None:
    records = prompts(5)
    result = answer(target, tmp_path / "train.jsonl", records)
    answers, _ = read_jsonl_tolerant(tmp_path / "train.jsonl")
    assert Counter(a["id"] for a in answers) == Counter(f"r{i}#{s}" for i in range(5) for s in range(2))
    assert result["tokens"] == sum(len(a["response_ids"]) for a in answers) and set(a["finish_reason"] for a in answers) <= {
        "stop",
        "length",
    }
    by_id = {a["id"]: a["response_ids"] for a in answers}
    assert len({tuple(ids) for ids in by_id.values()}) == 10  # each sample has a seed of its own
    kept = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)[:3]
    (tmp_path / "train.jsonl").write_text("".join(kept) + '{"id": "r4#')
    answer(target, tmp_path / "train.jsonl", records)
    again, _ = read_jsonl_tolerant(tmp_path / "train.jsonl")
    assert len(again) == 10 and {a["id"]: a["response_ids"] for a in again} == by_id
    answer(target, tmp_path / "loops.jsonl", records, cut_loops=2, samples=1, temperature=0.0, max_tokens=200)
    cut, _ = read_jsonl_tolerant(tmp_path / "loops.jsonl")
    assert any(a["finish_reason"] == "loop" for a in cut)
    answer(target, tmp_path / "greedy.jsonl", records, greedy=True)
    mixed = {a["id"]: a["response_ids"] for a in read_jsonl_tolerant(tmp_path / "greedy.jsonl")[0]}
    best = {a["id"]: a["response_ids"] for a in cut}  # all at temperature 0, cut at their loops
    assert all(mixed[f"r{i}#1"] == by_id[f"r{i}#1"] for i in range(5))
    assert all(mixed[name][: len(ids)] == ids[:24] for name, ids in best.items()) and mixed["r0#0"] != by_id["r0#0"]
    assert all(loop_start(a["response_ids"], 2) is None for a in cut)


@pytest.mark.slow
def test_speculation_counts_equal_the_engines_and_output_is_unchanged(target: Path) -> None:
    asked = [{"id": r["id"], "prompt_ids": r["prompt_ids"] * 2, "max_tokens": 40} for r in prompts(6)]
    shared = {"target_dir": target, "target_cfg": config(target), "prompts": asked, "hf_overrides": None, "dtype": "float32"}
    shared |= {"concurrency": 3, "max_model_len": 256}
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    plain, drafted = generate(speculative=None, **shared), generate(speculative=ngram, **shared)
    assert {k: v["token_ids"] for k, v in plain["outputs"].items()} == {k: v["token_ids"] for k, v in drafted["outputs"].items()}
    counters = drafted["counters"]
    assert counters["drafts"] > 0 and counters["accepted_tokens"] == sum(counters["accepted_per_position"]) > 0
    for key in ("drafts", "draft_tokens"):
        assert counters[key] == sum(o[key] for o in drafted["outputs"].values())
    assert plain["counters"]["drafts"] == 0 and plain["output_tokens"] == sum(len(o["token_ids"]) for o in plain["outputs"].values())
    assert len(plain["ttft_ms"]) == len(plain["itl_ms"]) == 6 and min(plain["ttft_ms"]) > 0


KILLED = """
import sys
sys.path.insert(0, {root!r})
sys.path.insert(0, {tests!r})
import test_engine as t
from pathlib import Path
{call}
"""


def kill_when(call: str, ready: Any, running: Any) -> None:
    """Runs `call` in a process, kills it (SIGKILL) as soon as `ready()`, and waits until its engine is gone with it."""
    code = KILLED.format(root=str(ROOT), tests=str(ROOT / "tests"), call=call)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not ready():
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.002)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert running(), "killed too late for this test to mean anything"
    for child in children:
        deadline = time.monotonic() + 10
        while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
            assert time.monotonic() < deadline, "the engine outlived its parent"
            time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_respond_goes_on_where_it_was(target: Path, tmp_path: Path) -> None:
    out, n = tmp_path / "train.jsonl", 300
    call = f"t.answer(Path({str(target)!r}), Path({str(out)!r}), t.prompts({n}), samples=1)"

    def lines() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    kill_when(call, lambda: lines() >= 5, lambda: lines() < n)
    before = out.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    answer(target, out, prompts(n), samples=1)
    assert set(before.splitlines()) <= set(out.read_bytes().splitlines())
    answers, _ = read_jsonl_tolerant(out)
    assert [a["id"] for a in answers] == [f"r{i}#0" for i in range(n)]


@pytest.mark.slow
def test_a_killed_capture_goes_on_where_it_was(target: Path, tmp_path: Path) -> None:
    responses, store, n = write_responses(tmp_path / "train.jsonl", 160, 10, 60), tmp_path / "store", 160
    call = f"t.take(Path({str(target)!r}), Path({str(responses)!r}), Path({str(store)!r}), in_flight=2, shard_tokens=1000)"
    kill_when(call, lambda: len(list(store.glob("shard-*.safetensors"))) >= 2, lambda: len(list(store.glob("shard-*.safetensors"))) < 10)
    kept = {path.name: path.stat().st_mtime_ns for path in store.glob("shard-*.safetensors")}
    listed = {shard["file"] for shard in json.loads((store / "manifest.json").read_text())["shards"]}
    take(target, responses, store, shard_tokens=1000)
    for name in listed:
        assert (store / name).stat().st_mtime_ns == kept[name]  # not captured again
    opened = Store(store, verify=True)
    assert sorted(opened.ids) == sorted(f"r{i}#0" for i in range(n)) and opened.manifest["closed"]
    assert not list(store.glob("*.tmp"))
