"""Conversations of every spelling become one record; the question decides what is a duplicate and which split it is in."""

import json
from dataclasses import replace

import pytest
from test_chat import QWEN3, supervised, tokenizer_for

from data.chat import prompt_ids
from data.prompts import select
from data.record import ChatRecord, Unusable, parse, question, record_of, split_of

USER, REPLY = {"role": "user", "content": "Why is the sky blue?"}, {"role": "assistant", "content": "It scatters."}
LOOK = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"where": "up"}'}}


def record(*messages, **more):
    return record_of({"messages": list(messages), **more}, "p.jsonl")


def test_openai_tool_calls_become_what_templates_render():
    call = {"role": "assistant", "content": None, "tool_calls": [LOOK], "function_call": None, "refusal": None}
    found = record(USER, call, {"role": "tool", "tool_call_id": "c1", "content": "blue"}, REPLY)
    arguments = {"where": "up"}  # an object: `tool_call.arguments | tojson` would write a text in quotes
    assert found.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**LOOK, "function": {"name": "look", "arguments": arguments}}],
    }
    assert found.messages[2]["tool_call_id"] == "c1"
    template = QWEN3.replace("+ call.function.name +", "+ call.function.arguments | tojson +")
    assert supervised(tokenizer_for(template), found)[0] == '\n<tool_call>\n{"where": "up"}\n</tool_call><|im_end|>'
    empty = {"id": "c2", "type": "function", "function": {"name": "look", "arguments": ""}}
    assert record(USER, {**call, "tool_calls": [empty]}).messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert "tool_calls" not in record(USER, {**REPLY, "tool_calls": []}).messages[1]


def test_tools_may_be_a_text_of_json_and_reach_the_template():
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    shown = tokenizer_for("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}")
    for given in (tools, json.dumps(tools)):
        found = record(USER, tools=given)
        assert found.tools == tools and shown.decode(prompt_ids(shown, found)) == "look" + USER["content"]
    assert record(USER, tools="").tools is record(USER, tools=[]).tools is None


def test_a_developer_is_the_system_and_reasoning_has_one_name():
    found = record({"role": "developer", "content": "Be brief."}, USER, {**REPLY, "reasoning": "Air."})
    assert [m["role"] for m in found.messages] == ["system", "user", "assistant"]
    assert found.messages[2] == {**REPLY, "reasoning_content": "Air."}
    assert supervised(tokenizer_for(QWEN3), found) == ["Air.\n</think>\n\nIt scatters.<|im_end|>"]


def logged(**line):
    return record_of(line, "log.jsonl")


def test_logs_of_a_server_are_the_conversations_in_them():
    request = {"model": "m", "temperature": 0.2, "messages": [USER], "tools": [{"type": "function"}]}
    answer = {"id": "chatcmpl-1", "choices": [{"index": 0, "message": {**REPLY, "refusal": None, "audio": None}, "finish_reason": "stop"}]}
    plain = record(USER, REPLY, tools=request["tools"])
    for found in (
        logged(request=request, response=answer),
        logged(request={"body": request}, response={"status_code": 200, "body": answer}),
        logged(body=request, method="POST", url="/v1/chat/completions", response=answer),
    ):
        assert found == plain
    batch = logged(custom_id="r1", body=request, meta={"category": "support"})
    assert (batch.id, batch.messages, batch.meta["category"]) == ("r1", [USER], "support")
    for said in (None, "overloaded", {"error": {}}, {"choices": []}, {"choices": [{"message": {"role": "assistant", "content": ""}}]}):
        assert logged(request=request, response=said).messages == [USER], "the question stands without an answer"
    with pytest.raises(Unusable, match="no list `messages`"):
        logged(request={"prompt": "Once upon"}, response=answer)


@pytest.mark.parametrize(
    ("reason", "turn"),
    {
        "no JSON": {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]},
        "a JSON object": {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
        "a name": {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
        "not a list of": {"role": "assistant", "tool_calls": {"name": "f"}},
        "is not a list": {"role": "assistant", "tool_calls": ["f"]},
        "reasoning_content": {**REPLY, "reasoning": ["step"]},
    }.items(),
)
def test_what_no_template_could_take_is_named_with_its_turn(reason, turn):
    with pytest.raises(Unusable, match=f"turn 2.*{reason}"):
        record(USER, turn)


def test_the_question_is_what_is_asked_and_nothing_else():
    one = record(USER, REPLY)
    for same in (record({"role": "user", "content": " why is  the\nSKY blue?"}), record(USER, id="x", meta={"category": "k"})):
        assert question(same) == question(one)
    tools = [{"type": "function"}]
    others = [record(USER, REPLY, USER), record(USER, tools=tools), record({"role": "system", "content": "x"}, USER)]
    assert len({question(r) for r in [one, *others]}) == 4


def test_the_split_follows_the_question_whatever_else_there_is():
    records = [ChatRecord(f"r{i}", [{"role": "user", "content": f"Question {i}?"}], {}) for i in range(2000)]
    train, heldout = (select(records, split, None) for split in ("train", "heldout"))
    assert {r.id for r in train}.isdisjoint(r.id for r in heldout) and len(train) + len(heldout) == 2000
    assert 150 < len(heldout) < 250
    assert {r.meta["split"] for r in heldout} == {"heldout"} and records[0].meta == {}
    kept = {r.id for r in heldout}
    assert {r.id for r in select(records[::-1][:500], "heldout", None)} <= kept  # of another set, in another order
    for r in records[:200]:  # under another name, with another answer
        other = replace(r, id="other", messages=[*r.messages, REPLY])
        assert (split_of(other) == "heldout") == (r.id in kept)


@pytest.mark.parametrize("raw", [b"[1]", b"\xff", b"[" * 100_000])
def test_a_line_that_is_no_object_is_unusable(raw):
    with pytest.raises(Unusable):
        parse(raw)
