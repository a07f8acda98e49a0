"""Masks by position: over small templates of the common kinds, the supervised tokens decode to what the assistant wrote, no more."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from data.chat import NoSupervisedTokens, load_tokenizer, loop_start, offpolicy, prompt_ids
from data.errors import UserError
from data.prompts import ChatRecord

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{% if loop.first and m.role == 'assistant' %}{{ raise_exception('bad role') }}{% endif %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# As Qwen3: thinking is shown, empty where there is none, behind the last user turn only; earlier turns lose theirs.
QWEN3 = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content %}{%- set thought = m.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>\n' + call.function.name + '\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
PLAIN = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TEMPLATES = {"chatml": (CHATML, "<|im_end|>"), "llama3": (LLAMA3, "<|eot_id|>"), "qwen3": (QWEN3, "<|im_end|>")}

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CORPUS = ["assistant:hello there, hello again\nuser:yes\n", "The sky is blue because the air scatters blue light.", "Hi.\n\n"] * 20


def tokenizer_for(template: str | None, split_words: bool = True, end: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A byte-level BPE made on the spot. Without `split_words` its merges run across ':' and newlines into the answer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, max_token_length=16
    )
    bpe.train_from_iterator(CORPUS, trainer)
    bpe.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end, additional_special_tokens=SPECIAL, chat_template=template)


class Characters(PreTrainedTokenizer):
    """A slow tokenizer, one token a character."""

    @property
    def vocab_size(self) -> int:
        return 0x110000

    def get_vocab(self) -> dict[str, int]:
        return {}

    def _tokenize(self, text: str) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)


@pytest.fixture(scope="module", params=TEMPLATES)
def templated(request) -> tuple[PreTrainedTokenizerFast, str]:
    template, end = TEMPLATES[request.param]
    return tokenizer_for(template, end=end), end


def chat(*contents: str, system: str | None = None) -> ChatRecord:
    """Turns of user and assistant, alternating."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return ChatRecord("r1", ([{"role": "system", "content": system}] if system else []) + turns, {})


def supervised(tokenizer: PreTrainedTokenizerFast, record: ChatRecord) -> list[str]:
    """The decoded text of each run of supervised tokens."""
    ids, mask = offpolicy(tokenizer, record)
    assert len(ids) == len(mask)
    assert ids == tokenizer.apply_chat_template(record.messages, tools=record.tools, tokenize=True, return_dict=False)
    runs: list[list[int]] = []
    for i, (token, on) in enumerate(zip(ids, mask, strict=True)):
        if on and (i == 0 or not mask[i - 1]):
            runs.append([])
        if on:
            runs[-1].append(token)
    return [str(tokenizer.decode(run)) for run in runs]


CONVERSATIONS = {
    "one turn": ["Why is the sky blue?", "The air scatters blue light."],
    "several turns": ["Hi", "Hello there.", "Why?", "Because.\n\nReally.", "Thanks", "Bye"],
    "answer repeats the question": ["blue", "blue", "blue light", "blue", "blue", "blue light"],
    "answer is a header": ["user\n", "assistant\nuser", "assistant", "assistant"],
    "answer is one letter of the template": ["<", "<", "t", "t", "\n<", ">"],
    "other scripts": ["Gökyüzü?", "Mavi görünür 🌈🌈 é", "再见", "再见 <think"],
    "ends with the user": ["Hi", "Hello there.", "And then?"],
    "private use characters": ["\ue000", "\ue000\ue001", "\ue001", "\ue000"],
}


@pytest.mark.parametrize("system", [None, "blue"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_supervised_tokens_are_the_assistants_text_and_its_end(name, system, templated):
    tokenizer, end = templated
    contents = CONVERSATIONS[name]
    assert supervised(tokenizer, chat(*contents, system=system)) == [answer + end for answer in contents[1::2]]


def test_spaces_around_an_answer_that_the_template_trims_are_no_loss():
    assert supervised(tokenizer_for(LLAMA3, end="<|eot_id|>"), chat("Hi", "  Hello. \n")) == ["Hello.<|eot_id|>"]


def test_a_space_that_the_template_puts_before_an_answer_is_the_assistants():
    question, answer = "'[INST] ' + m.content + ' [/INST]'", "' ' + m.content + '<|im_end|>'"
    mistral = "{% for m in messages %}{{ " + question + " if m.role == 'user' else " + answer + " }}{% endfor %}"
    record = chat("light", "blue light", "blue", "blue light")
    assert supervised(tokenizer_for(mistral), record) == [" blue light<|im_end|>"] * 2


def test_the_part_of_an_answer_that_the_generation_prompt_gives_is_not_supervised():
    thinker = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert supervised(tokenizer_for(thinker), chat("Sky?", "<think>\nDay.\n</think>\n\nBlue.")) == ["Day.\n</think>\n\nBlue.<|im_end|>"]


def test_a_tokenizer_without_offsets_is_masked_by_prefixes():
    tokenizer = Characters(eos_token="<|im_end|>", chat_template=CHATML)
    ids, mask = offpolicy(tokenizer, chat("Hi", "Hi", "So", "So"))
    kept = [i for i, on in zip(ids, mask, strict=True) if on]
    assert tokenizer.convert_ids_to_tokens(kept) == ["H", "i", "<|im_end|>", "S", "o", "<|im_end|>"]


def test_two_user_turns_and_a_tool_turn_are_context(templated):
    tokenizer, end = templated
    roles = ["user", "user", "assistant", "tool", "assistant"]
    record = ChatRecord("r", [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)], {})
    assert supervised(tokenizer, record) == ["assistant 2" + end, "assistant 4" + end]


def test_thinking_that_the_template_writes_is_not_supervised():
    tokenizer = tokenizer_for(QWEN3)
    record = chat("Hi", "Hello there.")
    ids, mask = offpolicy(tokenizer, record)
    assert "<think>\n\n</think>\n\nHello" in tokenizer.decode(ids)
    thinking = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert isinstance(thinking, list) and not any(on and i in thinking for i, on in zip(ids, mask, strict=True))


def test_thinking_that_the_assistant_wrote_is_supervised_where_the_template_shows_it():
    tokenizer = tokenizer_for(QWEN3)
    thought, empty = "<think>\nIs it day?\n</think>\n\nBlue.", "<think>\n\n</think>\n\nBlue."
    assert supervised(tokenizer, chat("Sky?", thought)) == [thought + "<|im_end|>"]
    assert supervised(tokenizer, chat("Sky?", empty)) == [empty + "<|im_end|>"]
    assert supervised(tokenizer, chat("Sky?", thought, "Sea?", "Green.")) == ["Blue.<|im_end|>", "Green.<|im_end|>"]
    record = chat("Sky?", "Blue.")
    record.messages[1]["reasoning_content"] = "Is it day?"
    assert supervised(tokenizer, record) == ["Is it day?\n</think>\n\nBlue.<|im_end|>"]


@pytest.mark.parametrize("content", ["", "Let me look."])
def test_a_tool_call_is_supervised_with_its_turn(content):
    call = {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": {"name": "look"}}]}
    record = ChatRecord("r", [{"role": "user", "content": "Sky?"}, call, {"role": "tool", "content": "blue"}], {})
    assert supervised(tokenizer_for(QWEN3), record) == [content + "\n<tool_call>\nlook\n</tool_call><|im_end|>"]


def test_a_token_across_the_edge_of_an_answer_is_not_supervised():
    tokenizer = tokenizer_for(PLAIN, split_words=False)
    record = chat("yes", "hello there, hello again", "yes", "hello there")
    ids, mask = offpolicy(tokenizer, record)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    across = [i for i, piece in enumerate(pieces) if ":" in piece and not piece.endswith(":")]
    assert across and not any(mask[i] for i in across)  # the merge exists, so this is the case that prefixes cannot decide
    for run, answer in zip(supervised(tokenizer, record), record.messages[1::2], strict=True):
        assert run and run in answer["content"]  # nothing of the template, no newline that ends the turn


def test_a_conversation_without_supervised_tokens_is_named(templated):
    with pytest.raises(NoSupervisedTokens, match="record r1: no supervised token"):
        offpolicy(templated[0], chat("Hi"))
    silent = tokenizer_for("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(NoSupervisedTokens, match="r1"):
        offpolicy(silent, chat("Hi", "Hello"))


def test_prompt_ids_end_with_the_generation_prompt_and_leave_a_given_answer_out(templated):
    tokenizer, _ = templated
    given = chat("Hi", "Hello there.", "Why?", "Because.", system="Be brief.")
    ids = prompt_ids(tokenizer, given)
    assert all(type(i) is int for i in ids)
    assert ids == prompt_ids(tokenizer, chat("Hi", "Hello there.", "Why?", system="Be brief."))
    text = tokenizer.decode(ids)
    assert "Because." not in text and "Hello there." in text and "<think>" not in text
    assert text == tokenizer.apply_chat_template(given.messages[:-1], add_generation_prompt=True, tokenize=False)
    assert len(given.messages) == 5


def test_prompt_ids_are_the_prefix_of_the_offpolicy_ids_before_the_answer():
    tokenizer = tokenizer_for(CHATML)
    record = chat("Hi", "Hello there.")
    ids, mask = offpolicy(tokenizer, record)
    assert ids[: mask.index(True)] == prompt_ids(tokenizer, record)


def test_prompt_ids_keep_a_tool_result_that_follows_the_user():
    tokenizer = tokenizer_for(CHATML)
    record = ChatRecord("r", [{"role": r, "content": r} for r in ("user", "assistant", "tool", "assistant")], {})
    assert "<|im_start|>tool\ntool<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(prompt_ids(tokenizer, record))


def test_a_template_that_fails_names_the_record():
    refusing = tokenizer_for("{{ raise_exception('roles must alternate') }}")
    faulty = tokenizer_for("{{ messages[0].content + 1 }}")
    for tokenizer, message in ((refusing, "roles must alternate"), (faulty, "TypeError")):
        for make in (prompt_ids, offpolicy):
            with pytest.raises(UserError, match=f"record r1: .*{message}"):
                make(tokenizer, chat("Hi", "Hello"))
    with pytest.raises(UserError, match="record r1: .* no list of token ids"):
        prompt_ids(tokenizer_for("{{ '' }}"), chat("Hi"))


def test_load_tokenizer(tmp_path):
    for name, template in (("whole", CHATML), ("no template", None)):
        tokenizer_for(template).save_pretrained(tmp_path / name)
    (tmp_path / "empty").mkdir()
    loaded = load_tokenizer(tmp_path / "whole", False)
    assert prompt_ids(loaded, chat("Hi")) == prompt_ids(tokenizer_for(CHATML), chat("Hi"))
    assert loaded.get_vocab() == AutoTokenizer.from_pretrained(tmp_path / "whole").get_vocab()
    for name, message in (("no template", "no chat template"), ("empty", "no tokenizer can be loaded"), ("nosuch", "is no folder")):
        with pytest.raises(UserError, match=message):
            load_tokenizer(tmp_path / name, False)


def naive_loop_start(ids: list[int], n: int) -> int | None:
    grams = [ids[i : i + n] for i in range(len(ids) - n + 1)]
    return next((i for i, gram in enumerate(grams) if gram in grams[:i]), None)


def test_loop_start_is_where_an_ngram_returns():
    assert loop_start([1, 2, 3, 9, 1, 2, 3, 4], 3) == 4
    assert loop_start([5, 5, 5, 5], 3) == 1
    assert loop_start([1, 2, 3, 1, 2], 3) is None
    assert loop_start([], 8) is None and loop_start([1, 2], 8) is None
    for seed in range(50):
        ids = [(i * i * (seed + 3) + i // 5) % 7 for i in range(40)]
        for n in (1, 2, 4):
            assert loop_start(ids, n) == naive_loop_start(ids, n)
