import subprocess
import sys
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.api import RequestError
from engine.config import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["The capital of France is", "Once upon a time", "One, two, three,"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", kv_memory="100MiB", max_num_seqs=4)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    together = llm.generate(PROMPTS, [SamplingParams(temperature=0.0, max_tokens=n) for n in (12, 3, 7)])
    assert [result.prompt for result in together] == PROMPTS
    assert [len(result.outputs[0].token_ids) for result in together] == [12, 3, 7]
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].text.startswith(other.outputs[0].text)


def test_a_prompt_may_be_text_or_token_ids(llm: LLM) -> None:
    (by_text,) = llm.generate(PROMPTS[0], GREEDY)
    (by_ids,) = llm.generate([by_text.prompt_token_ids], GREEDY)
    assert by_ids.prompt is None
    assert by_ids.outputs == by_text.outputs
    assert by_ids.usage.reused == len(by_text.prompt_token_ids) - 1


def test_a_chat_ends_with_its_end_token_which_is_no_text(llm: LLM) -> None:
    (answer,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    completion = answer.outputs[0]
    assert completion.text == "The capital of France is Paris."
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] == 2


def test_several_chats_at_once(llm: LLM) -> None:
    questions = ["What is the capital of France?", "Name a colour."]
    chats = [[{"role": "user", "content": question}] for question in questions]
    together = llm.chat(chats, GREEDY)
    assert [answer.outputs for answer in together] == [llm.chat(chat, GREEDY)[0].outputs for chat in chats]


def test_control_tokens_in_a_message_are_text(llm: LLM) -> None:
    (plain,) = llm.chat([{"role": "user", "content": "x"}], GREEDY)
    (sly,) = llm.chat([{"role": "user", "content": "x<|im_end|>"}], GREEDY)
    assert sly.prompt_token_ids.count(2) == plain.prompt_token_ids.count(2)


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:4]
    (cut,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=12, stop=(stop,)))
    completion = cut.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == whole.outputs[0].token_ids[: len(completion.token_ids)]
    assert not llm._engine.has_work


def test_a_stop_token_is_not_text_either(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    third = whole.outputs[0].token_ids[2]
    (cut,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(third,)))
    assert cut.outputs[0].token_ids == whole.outputs[0].token_ids[:3]
    assert whole.outputs[0].text.startswith(cut.outputs[0].text)
    assert cut.outputs[0].text == llm._tokenizer.decode(whole.outputs[0].token_ids[:2])


def test_a_prompt_that_cannot_run_is_named_and_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^prompt 1: .* 9000 ") as caught:
        llm.generate([[1, 2], [1] * 9000, [3]], GREEDY)
    assert caught.value.code == "context_length_exceeded"
    assert not llm._engine.has_work
    llm._engine.check_integrity()


def test_params_must_be_one_or_one_for_each(llm: LLM) -> None:
    with pytest.raises(RequestError, match="one for each \\(3\\), got 2"):
        llm.generate(PROMPTS, [GREEDY, GREEDY])


def test_a_progress_bar_counts_answers(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS[:2], GREEDY, progress=True)
    assert "Answering" in capsys.readouterr().out


def test_no_prompts_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^block_sise: no such engine setting"):
        LLM(block_sise=16)


def test_the_example_runs() -> None:
    root = Path(__file__).resolve().parents[2]
    code = "import runpy; runpy.run_path('examples/offline.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "The capital of France is Paris." in done.stdout
    assert "of them reused" in done.stdout
