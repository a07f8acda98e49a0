"""The one chat record that every source becomes, from OpenAI's chat format, a log of it or ShareGPT's, or why a row cannot be one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}  # ShareGPT's, and OpenAI's newer word
SPLITS = ("train", "heldout")
HELDOUT_ONE_IN = 10  # share of the records without a split that are held out
OTHER = "other"
UNKNOWN = "und"  # language


@dataclass
class ChatRecord:
    """One conversation. messages: [{"role", "content": str, ...}], an assistant's also with tool_calls (arguments as an object, as chat
    templates want them) and reasoning_content; meta: category, language, perhaps split ("train" | "heldout")."""

    id: str
    messages: list[dict[str, Any]]
    meta: dict[str, Any]
    tools: list[Any] | None = None
    source: str | None = field(default=None, compare=False)  # as data.prompts names it


class Unusable(Exception):
    """Why one row cannot be used; becomes the reason in the quarantine."""


def parse(raw: bytes | dict[str, Any]) -> dict[str, Any]:
    """A line of JSONL, or an already parsed row, as an object. Unusable: it is none."""
    try:
        row = json.loads(raw.decode()) if isinstance(raw, bytes) else raw
    except (ValueError, RecursionError) as why:  # ValueError: bad JSON, bad UTF-8
        raise Unusable(f"malformed JSON: {why}") from why
    if not isinstance(row, dict):
        raise Unusable(f"a JSON object is expected, not {type(row).__name__}")
    return row


def record_of(row: dict[str, Any], source: str) -> ChatRecord:
    """Unusable, naming the turn or the key: the row is no conversation that a chat template could take."""
    row = _unwrapped(row)
    turns = row.get("messages") or row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise Unusable("no list `messages` or `conversations` with a turn in it")
    messages = [_message(turn, n) for n, turn in enumerate(turns, 1)]
    _check_order([m["role"] for m in messages])
    tools = _tools(row.get("tools"))
    content = json.dumps([messages, tools], sort_keys=True, default=str)
    record = ChatRecord(_record_id(row.get("id"), content), messages, _meta(row.get("meta")), tools, source)
    try:
        json.dumps([record.id, messages, record.meta, tools], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError) as why:  # a lone surrogate (valid JSON, no text), NaN, or a date in a Parquet column
        raise Unusable(f"cannot be written as UTF-8 JSON: {why}") from why
    return record


def _unwrapped(row: dict[str, Any]) -> dict[str, Any]:
    """A line of a server's log, {"request" or "body": {"messages", "tools"}, "response"}, as the conversation that it is; the answer, where
    the log has one, is its last turn. OpenAI's batch files have `body` and `custom_id`."""
    inner = next((row[key] for key in ("request", "body") if isinstance(row.get(key), dict)), None)
    if "messages" in row or "conversations" in row or inner is None:
        return row
    found = _unwrapped(inner)
    turns, answer = found.get("messages"), _answer(row.get("response"))
    names = {"id": row.get("id") or row.get("custom_id") or found.get("id"), "meta": row.get("meta") or found.get("meta")}
    return {**found, **names} | ({"messages": [*turns, answer]} if answer and isinstance(turns, list) else {})


def _answer(response: Any) -> dict[str, Any] | None:
    """The first choice's message of a chat completion, perhaps within `body`; None where it says nothing, as of a request that failed."""
    body = response.get("body", response) if isinstance(response, dict) else {}
    choices = body.get("choices") if isinstance(body, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(message, dict) or not (message.get("content") or message.get("tool_calls")):
        return None
    return {key: message[key] for key in ("role", "content", "tool_calls", "reasoning", "reasoning_content") if key in message}


def asked(record: ChatRecord) -> list[dict[str, Any]]:
    """The turns up to the last of a user or a tool: what an answer is wanted to."""
    last = max(i for i, message in enumerate(record.messages) if message["role"] in ("user", "tool"))
    return record.messages[: last + 1]


def question(record: ChatRecord) -> str:
    """sha256 (hex) of what is asked and of the tools at hand; case and the width of white space make no difference."""
    turns = [{**message, "content": " ".join(message["content"].split()).casefold()} for message in asked(record)]
    return hashlib.sha256(json.dumps([turns, record.tools], sort_keys=True).encode()).hexdigest()


def split_of(record: ChatRecord) -> str:
    """meta.split, or what the hash of the question says: it depends on no other record and on no name, so it stays as data grows."""
    return record.meta.get("split") or SPLITS[int(question(record)[:8], 16) % HELDOUT_ONE_IN == 0]


def _message(turn: Any, n: int) -> dict[str, Any]:
    """A turn in either spelling as {"role", "content", ...}; null fields, which Parquet makes of absent ones, are dropped."""
    if not isinstance(turn, dict):
        raise Unusable(f"turn {n} is not an object")
    given = turn.get("role") or turn.get("from")
    role = OTHER_ROLES.get(str(given), given)
    if role not in ROLES:
        raise Unusable(f"turn {n} has the unknown role {given!r}; known: {', '.join((*ROLES, *OTHER_ROLES))}")
    extra = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
    if thought := extra.pop("reasoning", None):  # OpenRouter's and vLLM's word for what chat templates call
        extra.setdefault("reasoning_content", thought)
    if not isinstance(extra.get("reasoning_content", ""), str):
        raise Unusable(f"turn {n}: reasoning_content is not a text")
    if calls := extra.pop("tool_calls", None):
        extra["tool_calls"] = _calls(calls, n)
    text = _text(turn["content"] if turn.get("content") is not None else turn.get("value"), n)
    if not text.strip() and (role == "user" or (role == "assistant" and not calls)):
        raise Unusable(f"turn {n} ({role}) is empty")
    return {"role": role, "content": text, **extra}


def _calls(calls: Any, n: int) -> list[Any]:
    """OpenAI's format has the arguments as a text of JSON, chat templates write an object as JSON: as a text they would be quoted twice."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls):
        raise Unusable(f"turn {n}: tool_calls is not a list of {{'function': {{'name', 'arguments'}}}}")
    found = []
    for call in calls:
        arguments = call["function"].get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as why:
                raise Unusable(f"turn {n}: the arguments of a tool call are no JSON: {why}") from why
        if not isinstance(arguments, dict) or not isinstance(call["function"].get("name"), str):
            raise Unusable(f"turn {n}: a tool call needs a name, and arguments that are a JSON object")
        kept = {key: value for key, value in call.items() if value is not None}
        found.append({**kept, "function": {**call["function"], "arguments": arguments}})
    return found


def _tools(given: Any) -> list[Any] | None:
    """A list, or the JSON of one: data sets in Parquet have it as a text, because tools differ in shape."""
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as why:
            raise Unusable(f"`tools` is a text and no JSON: {why}") from why
    if given and not isinstance(given, list):
        raise Unusable("`tools` is not a list")
    return given or None


def _text(content: Any, n: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Unusable(f"turn {n}: the content is {type(content).__name__}, not a text or a list of text parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Unusable(f"turn {n}: only parts of the form {{'type': 'text', 'text': ...}} can be used")
    return "\n".join(part["text"] for part in content)  # as vLLM joins them when it serves


def _check_order(roles: list[str]) -> None:
    if "user" not in roles:
        raise Unusable("no user turn")
    first = next(role for role in roles if role != "system")
    if first != "user":
        raise Unusable(f"the conversation starts with the {first}")


def _record_id(given: Any, content: str) -> str:
    if given is None or given == "":
        return "sha-" + hashlib.sha256(content.encode()).hexdigest()[:16]
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise Unusable(f"the id is {type(given).__name__}, not a text or a whole number")
    return str(given)


def _meta(given: Any) -> dict[str, Any]:
    if given is not None and not isinstance(given, dict):
        raise Unusable("`meta` is not an object")
    meta = {"category": OTHER, "language": UNKNOWN} | {k: v for k, v in (given or {}).items() if v is not None}
    for key in ("category", "language"):
        if not isinstance(meta[key], str):
            raise Unusable(f"meta.{key} is not a text")
    if "split" in meta and meta["split"] not in SPLITS:
        raise Unusable(f"meta.split is {meta['split']!r}; known: {', '.join(SPLITS)}")
    return meta
