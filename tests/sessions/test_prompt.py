"""A prompt that is grown is the prompt that would be rendered, and each is the beginning of the next."""

from __future__ import annotations

import functools
import logging
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessions import tokens
from sessions.memo import PrefixDigest
from sessions.prompt import PromptBuilder, Segment
from sessions.tokenizer import ChatTokenizer, Message
from tests.sessions.support import (
    EXTENDING,
    INLINE,
    THINKING,
    default_tokenizer,
    raw_default_tokenizer,
    toy_tokenizer,
)

words = st.lists(
    st.sampled_from(
        ["hello", " ", "  ", "\n", "Ünïcode", "你好", "👩‍👩‍👧", "<|im_end|>", "<e>", "a", ".", "\t", "\ufdd2"]
    ),
    min_size=1,
    max_size=8,
).map("".join)
plain = st.lists(
    st.sampled_from(["hello", " ", "  ", "\n", "Ünïcode", "你好", "👩‍👩‍👧", "a", ".", "\t"]), max_size=8
).map("".join)
# An answer that begins with blanks would be encoded otherwise in one piece with the template's line end; what
# was generated is kept as it was, so the one-shot text is no measure for it.
plain_turns = st.lists(st.tuples(plain, plain.map("A{}".format)), min_size=1, max_size=5)


@functools.cache
def default_builder() -> PromptBuilder:
    return PromptBuilder(default_tokenizer())


def ids_of(tokenizer: ChatTokenizer, text: str) -> array[int]:
    return tokens.ids(tokenizer.encode_text(text))


def rendered(tokenizer: ChatTokenizer, messages: list[Message]) -> array[int]:
    return tokens.ids(
        tokenizer.encode(tokenizer.render(messages, generation_prompt=True)[0], continues=False)
    )


def grown(
    builder: PromptBuilder, system: list[Message], said: list[tuple[str, array[int]]]
) -> list[array[int]]:
    """The prompts of a conversation, grown turn by turn with these answers."""
    prompts = []
    history = tokens.ids()
    for number, (question, answer) in enumerate(said):
        new = [Message("user", question)]
        segment = builder.next(new) if number else builder.first(system + new)
        prompts.append(history + segment.ids)
        history = history + segment.settled + answer
    return prompts


def test_the_default_model_template_extends() -> None:
    builder = PromptBuilder(default_tokenizer())
    assert builder.proof.extends
    assert builder.proof.recomputed == 0
    assert builder.proof.closing == default_tokenizer().control_tokens["<|im_end|>"]


@settings(deadline=None, max_examples=60)
@given(plain_turns, st.sampled_from([[], [Message("system", "Be brief.")]]))
def test_grown_prompts_of_the_default_model_are_those_transformers_renders(
    said: list[tuple[str, str]], system: list[Message]
) -> None:
    tokenizer = default_tokenizer()
    builder = default_builder()
    prompts = grown(builder, system, [(question, ids_of(tokenizer, answer)) for question, answer in said])
    messages = [{"role": m.role, "content": m.content} for m in system]
    for (question, answer), prompt in zip(said, prompts, strict=True):
        messages.append({"role": "user", "content": question})
        whole = raw_default_tokenizer().apply_chat_template(messages, add_generation_prompt=True)
        assert prompt.tolist() == whole["input_ids"]
        messages.append({"role": "assistant", "content": answer})


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(words, st.lists(st.integers(17, 49151), max_size=20)), min_size=2, max_size=6))
def test_whatever_was_generated_each_prompt_begins_with_the_one_before_and_its_answer(
    said: list[tuple[str, list[int]]],
) -> None:
    answers = [(question, tokens.ids(answer)) for question, answer in said]
    prompts = grown(default_builder(), [], answers)
    for (_, answer), prompt, following in zip(answers, prompts, prompts[1:], strict=False):
        known = prompt + answer
        assert following[: len(known)] == known
        # The token that ends an answer is the first of what comes next, so it may be generated or not.
        assert following[len(known)] == 2


@pytest.mark.parametrize("name", EXTENDING)
def test_other_templates_that_only_append_are_recognised(name: str) -> None:
    tokenizer = toy_tokenizer(EXTENDING[name])
    builder = PromptBuilder(tokenizer)
    assert builder.proof.extends, builder.proof.reason
    assert builder.proof.closing == tokenizer.control_tokens["<e>"]
    said = [("one", "first"), ("two", "second"), ("three", "third")]
    prompts = grown(builder, [], [(question, ids_of(tokenizer, answer)) for question, answer in said])
    messages: list[Message] = []
    for (question, answer), prompt in zip(said, prompts, strict=True):
        messages.append(Message("user", question))
        assert prompt == rendered(tokenizer, messages)
        messages.append(Message("assistant", answer))


def test_a_template_that_puts_the_system_prompt_into_the_first_question_is_followed() -> None:
    builder = PromptBuilder(toy_tokenizer(INLINE))
    # This template puts a space before an answer in the history, which it does not when the answer is due.
    assert not builder.proof.extends
    tokenizer = toy_tokenizer(INLINE)
    prompts = grown(builder, [Message("system", "S")], [("q", ids_of(tokenizer, "a")), ("r", tokens.ids())])
    messages = [Message("system", "S"), Message("user", "q"), Message("assistant", "a"), Message("user", "r")]
    assert prompts[1] == rendered(tokenizer, messages)


def test_a_template_that_rewrites_history_is_followed_and_its_cost_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = toy_tokenizer(THINKING)
    with caplog.at_level(logging.WARNING):
        builder = PromptBuilder(tokenizer)
    assert not builder.proof.extends
    assert builder.proof.recomputed == 2  # the mark and the line end after it
    assert "no token prefix" in builder.proof.reason
    assert "2 tokens" in caplog.text
    prompts = grown(builder, [], [("q", ids_of(tokenizer, "a")), ("r", tokens.ids())])
    messages = [Message("user", "q"), Message("assistant", "a"), Message("user", "r")]
    assert prompts[1] == rendered(tokenizer, messages)


def test_a_template_that_can_render_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no way"):
        PromptBuilder(toy_tokenizer("{{ raise_exception('no way') }}"))


def test_a_template_that_hides_answers_cannot_be_gone_on_from() -> None:
    silent = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="leaves out earlier answers"):
        PromptBuilder(toy_tokenizer(silent))


def test_without_an_answer_due_there_is_no_generation_prompt() -> None:
    builder = PromptBuilder(toy_tokenizer())
    waiting, due = builder.first([Message("user", "q")], answer=False), builder.first([Message("user", "q")])
    assert due.ids[: len(waiting.ids)] == waiting.ids
    assert len(waiting.ids) < len(due.ids)


class TestKnownAnswers:
    """A client that sends its history back as text."""

    messages = (
        Message("user", "q"),
        Message("assistant", "an answer"),
        Message("user", "r"),
        Message("assistant", "unknown"),
        Message("user", "s"),
    )

    def test_known_answers_stand_as_they_were_generated(self) -> None:
        tokenizer = default_tokenizer()
        builder = PromptBuilder(tokenizer)
        # Letter by letter, as no encoder would do it.
        letters = tokens.ids(token for letter in "an answer" for token in tokenizer.encode_text(letter))
        asked = builder.first(self.messages[:1]).ids
        expected = PrefixDigest(asked).value()

        def known(prefix: PrefixDigest, text: str) -> array[int] | None:
            return letters if prefix.value() == expected and text == "an answer" else None

        resent = builder.first(self.messages, known=known).ids
        assert resent[: len(asked) + len(letters)] == asked + letters
        assert tokenizer.decode(resent) == tokenizer.decode(builder.first(self.messages).ids)

    def test_unknown_answers_are_encoded(self) -> None:
        builder = PromptBuilder(default_tokenizer())
        unknown = builder.first(self.messages, known=lambda prefix, text: None)
        assert unknown == builder.first(self.messages)

    def test_the_prefix_of_each_answer_is_all_that_comes_before_it(self) -> None:
        builder = PromptBuilder(default_tokenizer())
        asked: list[tuple[bytes, str]] = []

        def note(prefix: PrefixDigest, text: str) -> None:
            asked.append((prefix.value(), text))

        builder.first(self.messages, known=note)
        first = builder.first(self.messages[:1]).ids
        second = builder.first(self.messages[:3]).ids
        assert asked == [
            (PrefixDigest(first).value(), "an answer"),
            (PrefixDigest(second).value(), "unknown"),
        ]


def test_a_segment_of_an_extending_template_is_the_same_in_the_history() -> None:
    segment = PromptBuilder(toy_tokenizer()).next([Message("user", "q")])
    assert segment == Segment(segment.ids, segment.ids)
