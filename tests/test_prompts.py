"""Reading prompts: what is accepted, what is quarantined and why, how splits are drawn; the response files; the committed prompt set."""

import json
import re
from pathlib import Path

import pytest

from data.errors import UserError
from data.prompts import ChatRecord, read_jsonl_tolerant, read_prompts, select, write_jsonl_line

ROOT = Path(__file__).resolve().parents[1]
USER = {"role": "user", "content": "Why is the sky blue?"}
REPLY = {"role": "assistant", "content": "It scatters."}


def ask(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def write_lines(path: Path, *rows: object) -> Path:
    """One line per row; str and bytes are written as they are."""
    raw = [row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def read(tmp_path: Path, *rows: object) -> tuple[list[ChatRecord], list[dict]]:
    """Records and left out lines of a file with `rows`, behind one good record that keeps an all-bad file from being an error."""
    write_lines(tmp_path / "p.jsonl", {"id": "good", "messages": [{"role": "user", "content": "A good one."}]}, *rows)
    bad: list[dict] = []
    records = read_prompts(["p.jsonl"], tmp_path, left_out=bad)
    assert records[0].id == "good"
    return records[1:], bad


def test_a_record_keeps_its_fields_and_gets_defaults(tmp_path):
    meta = {"category": "sky", "language": "en", "split": "heldout", "source": "own"}
    full = {"id": 7, "messages": [USER, REPLY], "meta": meta, "tools": [{"type": "function"}]}
    records, bad = read(tmp_path, full, {"id": "b", "messages": [USER], "meta": None})
    assert bad == []
    assert records[0] == ChatRecord("7", [USER, REPLY], meta, [{"type": "function"}])
    assert records[1] == ChatRecord("b", [USER], {"category": "other", "language": "und"}, None)


def test_sharegpt_conversations_are_read(tmp_path):
    said = [("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello"), ("tool", "42"), ("human", "Bye")]
    records, _ = read(tmp_path, {"id": "s", "conversations": [{"from": who, "value": what} for who, what in said]})
    roles = ["system", "user", "assistant", "tool", "user"]
    assert records[0].messages == [{"role": role, "content": what} for role, (_, what) in zip(roles, said, strict=True)]


def test_text_parts_are_joined_as_the_engine_joins_them(tmp_path):
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    records, _ = read(tmp_path, {"messages": [{"role": "user", "content": parts}]})
    assert records[0].messages == [{"role": "user", "content": "One\ntwo"}]


def test_unusual_but_sound_conversations_are_kept(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    records, bad = read(
        tmp_path,
        {"id": "two users", "messages": [USER, USER]},
        {"id": "empty system", "messages": [{"role": "system", "content": ""}, USER]},
        {"id": "tool call", "messages": [USER, call, {"role": "tool", "content": ""}]},
        {"id": "line separator", "messages": [{"role": "user", "content": "a\u2028b\x85c"}]},
        "",
    )
    assert bad == [] and len(records) == 4
    assert records[2].messages[1] == call | {"content": ""}


def test_a_missing_id_is_a_hash_of_the_content(tmp_path):
    other = {"role": "user", "content": "Why is grass green?"}
    records, bad = read(tmp_path, {"messages": [USER]}, {"messages": [other], "id": None}, {"id": "", "messages": [USER]})
    assert [r.id[:4] for r in records] == ["sha-", "sha-"] and records[0].id != records[1].id
    assert "already used at p.jsonl:2" in bad[0]["reason"]  # the same content again
    assert read(tmp_path, {"messages": [other]})[0][0].id == records[1].id


UNUSABLE = {
    "unknown role": ({"messages": [USER, {"role": "narrator", "content": "x"}]}, "turn 2 has the unknown role 'narrator'"),
    "unknown sharegpt role": ({"conversations": [{"from": "bard", "value": "x"}]}, "unknown role 'bard'"),
    "no role": ({"messages": [{"content": "x"}]}, "turn 1 has the unknown role None"),
    "empty prompt": ({"messages": [{"role": "user", "content": " \n"}]}, "turn 1 (user) is empty"),
    "null prompt": ({"messages": [{"role": "user", "content": None}]}, "turn 1 (user) is empty"),
    "empty answer": ({"messages": [USER, {"role": "assistant", "content": ""}]}, "turn 2 (assistant) is empty"),
    "no user turn": ({"messages": [{"role": "system", "content": "x"}]}, "no user turn"),
    "assistant first": ({"messages": [{"role": "system", "content": "x"}, REPLY, USER]}, "starts with the assistant"),
    "image part": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "turn 1: only parts"),
    "number as content": ({"messages": [{"role": "user", "content": 3}]}, "turn 1: the content is int"),
    "turn no object": ({"messages": ["hello"]}, "turn 1 is not an object"),
    "no messages": ({"prompt": "hello"}, "no list `messages`"),
    "no turns": ({"messages": []}, "no list `messages`"),
    "list line": ([1, 2], "a JSON object is expected, not list"),
    "malformed": ('{"messages": [', "malformed JSON"),
    "not utf-8": (b'{"id": "\xff"}', "malformed JSON"),
    "too deep": ("[" * 100_000, "malformed JSON"),
    "lone surrogate": ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "cannot be written as UTF-8"),
    "nan": ('{"messages": [{"role": "user", "content": "x"}], "meta": {"score": NaN}}', "cannot be written as UTF-8"),
    "unknown split": ({"messages": [USER], "meta": {"split": "test"}}, "meta.split is 'test'"),
    "meta no object": ({"messages": [USER], "meta": "x"}, "`meta` is not an object"),
    "category no text": ({"messages": [USER], "meta": {"category": 1}}, "meta.category"),
    "tools no list": ({"messages": [USER], "tools": {"a": 1}}, "`tools` is not a list"),
    "id no text": ({"messages": [USER], "id": [1]}, "the id is list"),
    "same id": ({"messages": [USER], "id": "good"}, "id 'good' was already used at p.jsonl:1"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_line_is_quarantined_with_place_and_reason(case, tmp_path, capsys):
    row, reason = UNUSABLE[case]
    records, bad = read(tmp_path, "", row)
    assert records == []
    assert len(bad) == 1 and bad[0]["file"] == "p.jsonl" and bad[0]["line"] == 3 and reason in bad[0]["reason"]
    assert bad[0]["text"]
    said = capsys.readouterr().err
    assert "1 of 2 prompt records left out" in said and "p.jsonl:3: " in said


def test_only_bad_lines_are_an_error(tmp_path):
    write_lines(tmp_path / "p.jsonl", "nonsense", {"messages": []})
    with pytest.raises(UserError, match=r"none of the 2 .* p.jsonl:1: malformed"):
        read_prompts(["p.jsonl"], tmp_path)


def test_a_folder_is_its_files_in_order(tmp_path):
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "set"
    folder.mkdir()
    write_lines(folder / "c.jsonl", {"id": "c", "messages": [USER]})
    write_lines(folder / "a.jsonl", b"\xef\xbb\xbf" + json.dumps({"id": "a", "messages": ask("a?")}).encode())
    rows = [{"id": "b", "messages": [*ask("b?"), USER | {"name": "x"}, REPLY], "meta": {"category": "k"}}, {"id": "none", "messages": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "b.parquet")
    (folder / "notes.txt").write_text("not read")
    bad: list[dict] = []
    records = read_prompts(["set"], tmp_path, left_out=bad)
    assert [r.id for r in records] == ["a", "b", "c"]
    assert records[1].messages == [*ask("b?"), USER | {"name": "x"}, REPLY]  # the null name that Parquet gives the reply is gone
    assert [(row["file"], row["line"]) for row in bad] == [("set/b.parquet", 2)]


def test_each_line_of_a_plain_text_is_a_question(tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufeffWhy is it blue?\n\n  Çay?  \r\n".encode() + b"bad \xff\nlast")
    bad: list = []
    records = read_prompts(["2*p.txt"], tmp_path, left_out=bad)
    assert [r.messages for r in records] == [ask("Why is it blue?"), ask("Çay?"), ask("last")]
    assert [row["line"] for row in bad] == [4] and "UTF-8" in bad[0]["reason"]


def test_saved_and_hub_data_sets_are_read(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = datasets.Dataset.from_list([{"id": "a", "messages": [USER]}, {"id": "b", "messages": [*ask("b?"), REPLY]}])
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "both")
    data.to_json(tmp_path / "hub" / "train.jsonl")
    assert [r.id for r in read_prompts(["saved"], tmp_path)] == ["a", "b"]
    assert [r.id for r in read_prompts(["both/train"], tmp_path)] == ["a", "b"]
    assert [r.messages for r in read_prompts([f"hf:{tmp_path}/hub:train"], tmp_path)] == [[USER], [*ask("b?"), REPLY]]
    with pytest.raises(UserError, match="splits test, train; name one: both/"):
        read_prompts(["both"], tmp_path)
    with pytest.raises(UserError, match="cannot load hf:"):
        read_prompts([f"hf:{tmp_path}/hub:nosuch"], tmp_path)


def test_sources_that_are_not_there_or_not_known_are_errors(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "x.parquet").write_text("not parquet")
    (tmp_path / "blank.jsonl").write_text("\n")
    for source, message in {
        "nosuch": "does not exist",
        "empty": "holds no .jsonl",
        "x.csv": "neither .jsonl, .parquet nor .txt",
        "x.parquet": "not a readable Parquet",
        "blank.jsonl": "no prompts in .blank.jsonl",
    }.items():
        with pytest.raises(UserError, match=message):
            read_prompts([source], tmp_path)


def records_of(counts: dict[str, int]) -> list[ChatRecord]:
    return [ChatRecord(f"{c}-{i}", [USER], {"category": c, "split": "train"}) for c, n in counts.items() for i in range(n)]


def test_select_spreads_over_categories_and_a_smaller_limit_is_a_prefix():
    records = records_of({"x": 30, "y": 3, "z": 30})
    ids = [r.id for r in select(records, "train", 12)]
    assert sorted(ids) == sorted([f"{c}-{i}" for c in "xyz" for i in range(3)] + ["x-3", "x-4", "z-3"])
    everything = [r.id for r in select(records, "train", None)]
    assert everything[:12] == ids and sorted(everything) == sorted(r.id for r in records)
    assert select(records, "heldout", None) == [] and select(records, "train", 0) == []


def test_weights_are_the_shares_of_the_sources_until_one_has_no_more(tmp_path, capsys):
    for name, n in (("a", 100), ("b", 90), ("held", 1)):
        split = "heldout" if name == "held" else "train"
        rows = [{"id": f"{name}{i}", "messages": ask(f"{name} {i}?"), "meta": {"category": f"k{i % 2}", "split": split}} for i in range(n)]
        write_lines(tmp_path / f"{name}.jsonl", *rows)
    records = read_prompts(["3*a.jsonl", "b.jsonl", "0.5*held.jsonl"], tmp_path)
    mix = [r.id for r in select(records, "train", 80)]
    assert sum(name[0] == "a" for name in mix) == 60
    assert all(2 <= sum(name[0] == "a" for name in mix[i : i + 4]) <= 4 for i in range(0, 80, 4))  # spread, not in blocks
    assert [name for name in mix if name[0] == "a"][:4] == ["a0", "a1", "a2", "a3"]  # categories in turn within a source
    assert [r.id for r in select(records, "train", 30)] == mix[:30] and not capsys.readouterr().err
    everything = [r.id for r in select(records, "train", None)]
    assert sum(name[0] == "a" for name in everything) == 100 and 32 <= sum(name[0] == "b" for name in everything) <= 34
    assert "the mix for train ends after" in (said := capsys.readouterr().err) and "3*a.jsonl has no more" in said
    assert [r.id for r in select(records, "heldout", None)] == ["held0"]  # a source without a record of the split is not in its mix
    with pytest.raises(UserError, match=r"0\*a.jsonl has the weight 0"):
        read_prompts(["0*a.jsonl"], tmp_path)


def test_of_records_that_ask_the_same_the_first_is_used(tmp_path):
    write_lines(tmp_path / "a.jsonl", {"id": "1", "messages": [USER, REPLY]}, {"id": "2", "messages": ask("Other?")})
    write_lines(tmp_path / "b.jsonl", {"id": "3", "messages": ask("why is the sky  blue?\n")}, {"id": "4", "messages": [USER, REPLY, USER]})
    bad: list[dict] = []
    records = read_prompts(["a.jsonl", "b.jsonl"], tmp_path, left_out=bad)
    assert [r.id for r in records] == ["1", "2", "4"]
    assert [(b["file"], b["line"], b["reason"]) for b in bad] == [("b.jsonl", 1, "asks the same as a.jsonl:1")]


def test_questions_of_other_lengths_are_put_aside_with_the_key_that_says_so(tmp_path):
    write_lines(tmp_path / "p.jsonl", *({"id": f"{n}", "messages": [*ask("x" * n), REPLY]} for n in (3, 10, 20)))
    bad: list[dict] = []
    records = read_prompts(["p.jsonl"], tmp_path, (5, 10), bad)
    assert [r.id for r in records] == ["10"]  # the answer does not count
    reasons = [row["reason"] for row in bad]
    assert "in 3 characters, fewer than data.min_prompt_chars=5" in reasons[0] and "data.max_prompt_chars=10" in reasons[1]


def test_lines_written_are_read_back(tmp_path):
    rows = [{"id": "é#0", "text": "a\u2028b\n"}, {"id": "b", "response_ids": [1, 2]}]
    path = tmp_path / "out.jsonl"
    with path.open("a", encoding="utf-8") as f:
        for row in rows:
            write_jsonl_line(f, row)
            assert path.read_bytes().endswith(b"}\n")  # flushed line by line
    assert read_jsonl_tolerant(path) == (rows, path.stat().st_size)


@pytest.mark.parametrize("tail", [b'{"id": "c", "te', b'{"id": "c"}', b'{"id": "c", "te\n', b"\x00" * 100, b"\xff\n"])
def test_a_cut_last_line_is_left_out_and_its_place_told(tail, tmp_path):
    path = write_lines(tmp_path / "out.jsonl", {"id": "a"}, {"id": "b"})
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes() + tail)
    assert read_jsonl_tolerant(path) == ([{"id": "a"}, {"id": "b"}], whole)


def test_a_file_killed_at_any_byte_resumes_to_the_uninterrupted_file(tmp_path):
    rows = [{"id": f"ü{i}", "n": i} for i in range(3)]
    path = write_lines(tmp_path / "out.jsonl", *[json.dumps(r, ensure_ascii=False) for r in rows])
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        done, valid_bytes = read_jsonl_tolerant(path)
        with path.open("r+b") as f:
            f.truncate(valid_bytes)
        with path.open("a", encoding="utf-8") as f:
            for row in rows[len(done) :]:
                write_jsonl_line(f, row)
        assert path.read_bytes() == whole, cut


def test_a_broken_line_before_the_last_is_an_error(tmp_path):
    path = write_lines(tmp_path / "out.jsonl", {"id": "a"}, '{"id": ', {"id": "c"})
    with pytest.raises(UserError, match=r"out.jsonl:2: malformed JSON"):
        read_jsonl_tolerant(path)
    with pytest.raises(UserError, match="no such file"):
        read_jsonl_tolerant(tmp_path / "nosuch.jsonl")


def words(record: ChatRecord) -> set[str]:
    return set(re.findall(r"\w+", " ".join(m["content"] for m in record.messages if m["role"] == "user").casefold()))


def test_the_committed_prompt_set_is_sound_and_its_heldout_part_is_unseen():
    bad: list[dict] = []
    records = read_prompts(["data/promptset"], ROOT, left_out=bad)
    assert bad == []  # hence ids are unique
    slices = {r.meta["category"] for r in records}
    assert len(records) >= 600 and len(slices) == 10 and {p.stem for p in (ROOT / "data/promptset").glob("*.jsonl")} == slices
    assert {(r.meta["category"], r.meta["split"]) for r in records} == {(s, p) for s in slices for p in ("train", "heldout")}
    train, heldout = (select(records, split, None) for split in ("train", "heldout"))
    seen, unseen = ([(r.id, words(r)) for r in part] for part in (train, heldout))
    near = [(i, j) for i, a in unseen for j, b in seen if len(a & b) >= 0.8 * len(a | b)]
    assert near == []
