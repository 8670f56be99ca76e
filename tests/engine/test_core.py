"""What the engine does for one request and between several, on a model that reads back every token it is
given.
"""

import random

import pytest
import torch

from engine.api import GenerateRequest, PromptUsage, RequestError, SamplingParams
from engine.core import Engine
from tests.engine.support import (
    EOS,
    VOCAB,
    FakeModel,
    expected_answer,
    make_engine,
    next_token,
    request,
    run_to_end,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def step_until_running(engine: Engine, count: int) -> None:
    """Step until that many requests generate."""
    seen: set[str] = set()
    while len(seen) < count:
        seen |= {output.request_id for output in engine.step()}


def test_an_answer_is_what_the_model_says_token_by_token() -> None:
    engine = make_engine()
    asked = request("a", PROMPT, 12)
    answer = run_to_end(engine, asked)["a"]
    assert answer.token_ids == expected_answer(asked, engine.info.max_model_len)
    assert answer.last is not None
    assert answer.last.finish_reason == "length"
    assert answer.last.prompt == PromptUsage(len(PROMPT), 0, len(PROMPT))


def test_the_prompts_account_comes_with_the_first_tokens_and_at_the_end() -> None:
    engine = make_engine()
    engine.add_request(request("a", PROMPT, 3))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    usage = PromptUsage(len(PROMPT), 0, len(PROMPT))
    assert [output.prompt for output in outputs] == [usage, None, usage]


def test_requests_in_one_batch_do_not_touch_each_other() -> None:
    engine = make_engine()
    asked = [request(str(i), [i, *PROMPT[: 2 * i + 1]], 9) for i in range(9)]
    answers = run_to_end(engine, *asked)
    for one in asked:
        assert answers[one.request_id].token_ids == expected_answer(one, engine.info.max_model_len)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_beside_a_running_answer() -> None:
    model = FakeModel()
    engine = make_engine(model=model, max_num_batched_tokens=8)
    short, long = request("short", [1, 2], 30), request("long", PROMPT * 3, 2)
    engine.add_request(short)
    engine.step()
    engine.add_request(long)
    beside = 0
    while "long" not in (answered := [output.request_id for output in engine.step()]):
        assert answered == ["short"]  # decodes never wait for a prefill
        beside += 1
    assert beside >= len(PROMPT) * 3 // 8


def test_an_end_token_ends_the_answer_and_is_its_last_token() -> None:
    prompt = next([i, 1] for i in range(VOCAB) if next_token([i, 1]) == EOS)
    engine = make_engine()
    answer = run_to_end(engine, request("a", prompt, 5, ignore_eos=False))["a"]
    assert (answer.token_ids, answer.last and answer.last.finish_reason) == ([EOS], "stop")
    ignoring = run_to_end(engine, request("b", prompt, 5, ignore_eos=True))["b"]
    assert len(ignoring.token_ids) == 5
    stops = (ignoring.token_ids[1],)
    stopped = run_to_end(engine, request("c", prompt, 5, ignore_eos=True, stop_token_ids=stops))["c"]
    assert stopped.token_ids == ignoring.token_ids[: ignoring.token_ids.index(stops[0]) + 1]
    assert stopped.last is not None
    assert stopped.last.finish_reason == "stop"


def test_without_a_limit_the_answer_goes_to_the_end_of_the_context() -> None:
    engine = make_engine(max_model_len=40)
    answer = run_to_end(engine, request("a", PROMPT, None))["a"]
    assert len(answer.token_ids) == 40 - len(PROMPT)
    assert answer.last is not None
    assert answer.last.finish_reason == "length"


def test_the_next_turn_computes_its_new_tokens_and_the_last_one_sampled() -> None:
    engine = make_engine()
    first = run_to_end(engine, request("1", PROMPT, 7, branch="chat"))["1"]
    context = PROMPT + first.token_ids
    new = [11, 12, 13]
    second = run_to_end(engine, request("2", context + new, 7, branch="chat"))["2"]
    assert second.last is not None
    assert second.last.prompt == PromptUsage(len(context) + 3, len(context) - 1, 4)
    assert second.token_ids == expected_answer(request("2", context + new, 7), engine.info.max_model_len)


def test_a_warm_up_computes_the_whole_prompt_and_answers_nothing() -> None:
    engine = make_engine()
    warm = run_to_end(engine, request("w", PROMPT, generate=False))["w"]
    assert (warm.token_ids, warm.last and warm.last.finish_reason) == ([], "stop")
    assert warm.last is not None
    assert warm.last.prompt == PromptUsage(len(PROMPT), 0, len(PROMPT))
    after = run_to_end(engine, request("a", [*PROMPT, 5], 3))["a"]
    assert after.last is not None
    assert after.last.prompt == PromptUsage(len(PROMPT) + 1, len(PROMPT), 1)
    assert engine.stats().generation_tokens == 3


def test_tenants_share_nothing() -> None:
    engine = make_engine()
    run_to_end(engine, request("a", PROMPT, 4, tenant="a"))
    other = run_to_end(engine, request("b", PROMPT, 4, tenant="b"))["b"]
    assert other.last is not None
    assert other.last.prompt is not None
    assert other.last.prompt.reused == 0


def test_two_requests_with_the_same_prompt_at_once_say_the_same() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    asked = [request(str(i), PROMPT * 2, 6) for i in range(4)]
    answers = run_to_end(engine, *asked)
    expected = expected_answer(asked[0], engine.info.max_model_len)
    assert [answers[str(i)].token_ids for i in range(4)] == [expected] * 4


@pytest.mark.parametrize("stage", ["waiting", "mid-prefill", "running", "preempted", "during the last step"])
def test_an_abort_works_at_every_stage_and_leaves_nothing_behind(stage: str) -> None:
    engine = make_engine(num_blocks=16, max_num_batched_tokens=8, max_num_seqs=2)
    scheduler = engine.scheduler
    between = None
    if stage == "waiting":
        for name in "ab":
            engine.add_request(request(name, PROMPT[:3], 40))
        step_until_running(engine, 2)
        engine.add_request(request("x", PROMPT, 5))
        engine.step()
        assert scheduler.num_waiting == 1
    elif stage == "mid-prefill":
        engine.add_request(request("x", PROMPT, 5))
        engine.step()
        assert scheduler.running[0].table is not None
        assert 0 < scheduler.running[0].table.kv_len < len(PROMPT)
    elif stage == "running":
        engine.add_request(request("x", PROMPT, 5))
        step_until_running(engine, 1)
    elif stage == "preempted":
        engine.add_request(request("x", PROMPT, 5))
        step_until_running(engine, 1)
        scheduler.preempt(scheduler.running[0])
        assert scheduler.num_waiting == 1
    else:
        engine.add_request(request("x", PROMPT, 1))
        engine.step()
        engine.step()

        def between() -> None:
            engine.abort("x")

    if between is None:
        engine.abort("x")
    outputs = [output for output in engine.step(between) if output.request_id == "x"]
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [([], "abort")]
    engine.check_integrity()
    for name in "ab":
        engine.abort(name)
    run_to_end(engine)
    assert not engine.has_work
    usage = engine.cache.usage
    assert usage.free + usage.idle == usage.total
    assert engine.stats().finished["abort"] == (3 if stage == "waiting" else 1)


def test_aborting_an_unknown_or_ended_request_is_ignored() -> None:
    engine = make_engine()
    engine.abort("nobody")
    run_to_end(engine, request("a", PROMPT, 2))
    engine.abort("a")
    assert not engine.has_work


def test_an_aborted_answer_keeps_its_kv_for_the_next_turn() -> None:
    engine = make_engine()
    engine.add_request(request("a", PROMPT, 20, branch="chat"))
    said: list[int] = []
    while len(said) < 5:
        said += [token for output in engine.step() for token in output.token_ids]
    engine.abort("a")
    engine.step()
    after = run_to_end(engine, request("b", [*PROMPT, *said, 1], 2, branch="chat"))["b"]
    assert after.last is not None
    assert after.last.prompt is not None
    assert after.last.prompt.reused == len(PROMPT) + 4


@pytest.mark.parametrize(
    ("bad", "param", "code"),
    [
        (request("x", []), "prompt_ids", "invalid_request"),
        (request("x", [1, -1]), "prompt_ids", "invalid_request"),
        (request("x", [1, VOCAB]), "prompt_ids", "invalid_request"),
        (request("x", [1] * 40), "prompt_ids", "context_length_exceeded"),
        (request("taken", [1]), "request_id", "duplicate_request"),
    ],
)
def test_a_request_that_can_never_run_is_refused_by_field(
    bad: GenerateRequest, param: str, code: str
) -> None:
    engine = make_engine(max_model_len=40)
    engine.add_request(request("taken", [1]))
    with pytest.raises(RequestError) as caught:
        engine.add_request(bad)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert set(run_to_end(engine)) == {"taken"}


def test_the_longest_prompt_that_is_taken_gets_its_one_token() -> None:
    engine = make_engine(num_blocks=6, max_model_len=40)
    answer = run_to_end(engine, request("a", PROMPT + PROMPT[:19], None))["a"]
    assert len(answer.token_ids) == 1


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on() -> None:
    model = FakeModel(fail_at={3})
    engine = make_engine(model=model, max_num_seqs=2, max_num_batched_tokens=16)
    asked = [request(str(i), [i, *PROMPT], 6, branch=f"b{i}") for i in range(3)]
    answers = run_to_end(engine, *asked)
    for name in "01":
        last = answers[name].last
        assert last is not None
        assert last.finish_reason == "error"
        assert last.error == "RuntimeError: the model broke"
    assert answers["2"].token_ids == expected_answer(asked[2], engine.info.max_model_len)
    # What the failed step may have written half is not found again.
    again = run_to_end(engine, request("again", [0, *PROMPT], 6))["again"]
    assert again.last is not None
    assert again.last.prompt is not None
    assert again.last.prompt.reused == 0
    assert engine.stats().finished == {"error": 2, "length": 2}


def test_a_lost_device_is_not_something_to_go_on_after(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object) -> torch.Tensor:
        raise torch.AcceleratorError("illegal memory access")

    monkeypatch.setattr(FakeModel, "forward", lose)
    engine = make_engine()
    engine.add_request(request("a", PROMPT, 1))
    with pytest.raises(torch.AcceleratorError):
        engine.step()


def test_logits_that_are_not_finite_fail_only_their_request() -> None:
    class Poisoned(FakeModel):
        def forward(self, token_ids, positions, batch, pool, last):  # type: ignore[no-untyped-def]
            logits = super().forward(token_ids, positions, batch, pool, last)
            logits[token_ids[last] == 33] = float("nan")
            return logits

    engine = make_engine(model=Poisoned())
    answers = run_to_end(engine, request("bad", [1, 33], 3), request("good", [1, 2], 1))
    assert answers["bad"].last is not None
    assert answers["bad"].last.finish_reason == "error"
    assert answers["good"].last is not None
    assert answers["good"].last.finish_reason == "length"


def test_releasing_a_branch_frees_it_even_while_a_request_is_about_to_name_it() -> None:
    engine = make_engine()
    run_to_end(engine, request("1", PROMPT, 4, branch="chat"))
    assert engine.stats().branches == 1
    engine.release("default", "chat")
    assert engine.stats().branches == 0
    assert engine.stats().blocks_free == engine.stats().blocks_total

    engine.add_request(request("2", PROMPT, 4, branch="chat"))
    step_until_running(engine, 1)
    engine.release("default", "chat")
    engine.scheduler.preempt(engine.scheduler.running[0])
    run_to_end(engine)
    assert engine.stats().branches == 0


def test_seeds_of_requests_without_one_come_from_the_engines_own() -> None:
    def answer(seed: int | None) -> list[int]:
        engine = make_engine(seed=seed)
        sampling = SamplingParams(temperature=100.0, max_tokens=20, ignore_eos=True)
        return run_to_end(engine, GenerateRequest("a", PROMPT, sampling))["a"].token_ids

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)
    assert answer(None) != answer(None)


def test_stats_count_every_request_once() -> None:
    engine = make_engine()
    run_to_end(engine, request("a", PROMPT, 4), request("b", [1, 2, 3], 2))
    run_to_end(engine, request("c", PROMPT, 4))
    stats = engine.stats()
    assert stats.prompt_tokens == stats.prefix_queries_tokens == 2 * len(PROMPT) + 3
    assert stats.prefix_hits_tokens == len(PROMPT) - 1
    assert stats.generation_tokens == 10
    assert stats.finished == {"length": 3}
    assert stats.running == stats.waiting == stats.preemptions == 0
    parts = (stats.blocks_free, stats.blocks_idle, stats.blocks_pinned, stats.blocks_reserved)
    assert sum(parts) == stats.blocks_total == 64
    assert 0 < stats.tokens_resident <= stats.slots_allocated


def test_a_small_pool_preempts_and_every_answer_is_the_same() -> None:
    engine = make_engine(num_blocks=14, max_num_seqs=6)
    asked = [request(str(i), [i, *PROMPT], 40) for i in range(6)]
    answers = run_to_end(engine, *asked)
    assert engine.stats().preemptions > 0
    for one in asked:
        answer = answers[one.request_id]
        assert answer.token_ids == expected_answer(one, engine.info.max_model_len)
        assert answer.last is not None
        assert answer.last.prompt == PromptUsage(21, 0, 21), (
            "a prompt is counted once, at its first admission"
        )


def test_a_seeded_draw_is_the_same_after_preemption() -> None:
    class Flat(FakeModel):
        def forward(self, token_ids, positions, batch, pool, last):  # type: ignore[no-untyped-def]
            return super().forward(token_ids, positions, batch, pool, last) * 2.0

    def answers(num_blocks: int) -> tuple[list[list[int]], int]:
        engine = make_engine(model=Flat(), num_blocks=num_blocks, max_model_len=100, max_num_seqs=4)
        asked = [
            GenerateRequest(str(i), [i, *PROMPT], SamplingParams(seed=i, max_tokens=40, ignore_eos=True))
            for i in range(4)
        ]
        transcripts = run_to_end(engine, *asked)
        return [transcripts[str(i)].token_ids for i in range(4)], engine.stats().preemptions

    alone, none = answers(64)
    crowded, some = answers(14)
    assert none == 0
    assert some > 0
    assert crowded == alone


def test_without_prefix_caching_nothing_is_reused_and_nothing_stays() -> None:
    engine = make_engine(enable_prefix_caching=False, num_blocks=14, max_num_seqs=6)
    asked = [request(str(i), PROMPT, 40) for i in range(4)]
    answers = run_to_end(engine, *asked)
    for one in asked:
        assert answers[one.request_id].token_ids == expected_answer(one, engine.info.max_model_len)
    assert engine.stats().prefix_hits_tokens == 0
    assert engine.stats().blocks_free == 14


def test_long_random_load_on_a_tiny_pool_stays_exact() -> None:
    rng = random.Random(5)
    engine = make_engine(num_blocks=10, max_num_seqs=5, max_num_batched_tokens=11)
    asked = [
        request(
            str(i),
            [rng.randrange(3) for _ in range(rng.randrange(1, 40))],
            rng.randrange(1, 30),
            tenant=str(rng.randrange(3)),
            branch=rng.choice([None, f"b{i}"]),
        )
        for i in range(60)
    ]
    answers = run_to_end(engine, *asked)
    for one in asked:
        assert answers[one.request_id].token_ids == expected_answer(one, engine.info.max_model_len)
