"""Chat template, token ids and loss masks: the one place where masks are made, always by position, never by searching a text."""

from __future__ import annotations

import sys
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from data.record import ChatRecord, asked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NoSupervisedTokens(UserError):
    """A conversation from which nothing can be learnt; callers quarantine the record."""


def load_tokenizer(target_dir: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The target's tokenizer, read from its folder only. UserError: no folder, no tokenizer, no chat template."""
    from transformers import AutoTokenizer

    if not target_dir.is_dir():
        raise UserError(f"target.model: {target_dir} is no folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(target_dir), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as why:  # OSError, ValueError, KeyError, ...: transformers has many words for a missing or broken file
        reason = " ".join(str(why).split())
        raise UserError(
            f"{target_dir}: no tokenizer can be loaded ({reason}); copy tokenizer.json and tokenizer_config.json there"
        ) from why
    if not tokenizer.chat_template:
        raise UserError(f"{target_dir}: the tokenizer has no chat template; add the one the target was tuned with as chat_template.jinja")
    return tokenizer


def prompt_ids(tokenizer: PreTrainedTokenizerBase, record: ChatRecord) -> list[int]:
    """Token ids of the conversation up to its last user (or tool) turn, with the generation prompt: what an engine is given.

    UserError, naming the record: the template refuses it or renders nothing.
    """
    ids = _template(tokenizer, record, asked(record), add_generation_prompt=True, tokenize=True, return_dict=False)
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        raise UserError(f"record {record.id}: the chat template gives no list of token ids; check the target's tokenizer and template")
    return ids


def prompt_text(tokenizer: PreTrainedTokenizerBase, record: ChatRecord) -> str:
    """The text whose tokens are prompt_ids, for servers that are given text; they must add no special token to it."""
    return _render(tokenizer, record, asked(record), generation=True)


def all_prompt_ids(tokenizer: PreTrainedTokenizerBase, records: list[ChatRecord]) -> dict[str, list[int]]:
    """Record id -> prompt_ids. Records that the template refuses are left out and counted on stderr; UserError where it refuses all."""
    encoded: dict[str, list[int]] = {}
    refused: list[UserError] = []
    for record in records:
        try:
            encoded[record.id] = prompt_ids(tokenizer, record)
        except UserError as why:
            refused.append(why)
    if refused and not encoded:
        raise UserError(f"none of the {len(refused)} prompts can be used; the first, {refused[0]}") from refused[0]
    if refused:
        print(f"{len(refused)} of {len(records)} prompts left out; the first, {refused[0]}", file=sys.stderr)
    return encoded


def offpolicy(tokenizer: PreTrainedTokenizerBase, record: ChatRecord) -> tuple[list[int], list[bool]]:
    """Token ids [n] of the whole conversation and its loss mask [n]: the content of every assistant turn and the special token behind it.

    What the template itself puts into a turn (headers, an empty <think></think>) is not supervised, nor is a token that lies across the
    edge of the content. UserError: the template refuses the record; NoSupervisedTokens: nothing of it is supervised.
    """
    text = _render(tokenizer, record, record.messages)
    ids = _encode(tokenizer, text)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | set(tokenizer.all_special_ids)
    mask = [False] * len(ids)
    for turn, message in enumerate(record.messages):
        if message["role"] != "assistant":
            continue
        start, end = _content_span(tokenizer, record, text, turn)
        first, last = _token_range(tokenizer, record.id, text, ids, start, end)
        if first >= last:  # the template shows nothing of this turn
            continue
        if last < len(ids) and ids[last] in special:
            last += 1
        mask[first:last] = [True] * (last - first)
    if not any(mask):
        raise NoSupervisedTokens(f"record {record.id}: no supervised token: no assistant turn, or the target's chat template leaves it out")
    return ids, mask


def user_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of the chat template up to where a user's words begin. UserError: it puts nothing there."""
    probe = "\uf8fe"  # private use: no template holds it
    record = ChatRecord("the empty conversation", [{"role": "user", "content": probe}], {})
    ids = _encode(tokenizer, _render(tokenizer, record, record.messages).partition(probe)[0])
    if not ids:
        raise UserError("the target's chat template puts nothing before a user's words, so it cannot be asked to write them")
    return ids


def loop_start(ids: list[int], n: int) -> int | None:
    """Index at which an n-gram first begins for the second time (overlaps count); None where none returns. One pass over ids."""
    assert n > 0
    seen: set[tuple[int, ...]] = set()
    for i in range(len(ids) - n + 1):
        gram = tuple(ids[i : i + n])
        if gram in seen:
            return i
        seen.add(gram)
    return None


def _template(tokenizer: PreTrainedTokenizerBase, record: ChatRecord, messages: list[dict[str, Any]], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, tools=record.tools, **options)
    except Exception as why:  # a template is a program of the target's author: any exception may come out of it
        raise UserError(f"record {record.id}: the target's chat template refuses the conversation: {type(why).__name__}: {why}") from why


def _render(tokenizer: PreTrainedTokenizerBase, record: ChatRecord, messages: list[dict[str, Any]], generation: bool = False) -> str:
    return _template(tokenizer, record, messages, add_generation_prompt=generation, tokenize=False)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _content_span(tokenizer: PreTrainedTokenizerBase, record: ChatRecord, text: str, turn: int) -> tuple[int, int]:
    """Characters [start, end) of `text` that stem from what the assistant wrote in `turn`.

    The conversation is rendered again with one character in place of the turn's own fields; that character occurs nowhere in `text`, so the
    common prefix and suffix of the two renderings are exactly what the template writes around the turn. This holds where a prefix of
    the conversation renders otherwise than in the whole (Qwen3 drops the thinking of earlier turns) and where the content is trimmed.
    """
    probe = next(chr(c) for c in range(0xE000, 0xF900) if chr(c) not in text)  # private use area
    message = record.messages[turn]
    written = {key: probe for key in ("content", "reasoning_content") if key in message}
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    messages = record.messages.copy()
    messages[turn] = kept | written
    probed = _render(tokenizer, record, messages)
    if probe not in probed:
        return 0, 0
    start = len(commonprefix([text, probed]))
    end = len(text) - len(commonprefix([text[start:][::-1], probed[start:][::-1]]))
    header = _render(tokenizer, record, record.messages[:turn], generation=True)
    if text.startswith(header):  # then an engine starts at its end, and what lies behind it may be the assistant's too:
        content = message["content"]
        opening = text.startswith(content, len(header)) and not text.startswith(content.strip(), start)  # the template's own <think>
        space = text[len(header) : start].isspace()  # part of the answer's first token in most vocabularies
        if opening or space or start < len(header):
            start = len(header)
    return start, end


def _token_range(tokenizer: PreTrainedTokenizerBase, record_id: str, text: str, ids: list[int], start: int, end: int) -> tuple[int, int]:
    """Token positions [first, last) that lie wholly within the characters [start, end)."""
    before, upto = _encode(tokenizer, text[:start]), _encode(tokenizer, text[:end])
    if ids[: len(before)] == before and ids[: len(upto)] == upto:
        return len(before), len(upto)
    if not tokenizer.is_fast:
        raise UserError(
            f"record {record_id}: a token lies across the edge of an answer and the tokenizer has no offsets; use its fast version"
        )
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    inside = [i for i, (a, b) in enumerate(offsets) if start <= a and b <= end]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)
