import pytest

from cache.table import Table
from engine.api import PromptUsage
from engine.core import Engine
from tests.engine.support import make_engine, request, run_to_end


def first_outputs(engine: Engine) -> list[str]:
    """Request ids in the order in which their answers began."""
    order: list[str] = []
    while engine.has_work:
        for output in engine.step():
            if output.request_id not in order:
                order.append(output.request_id)
    return order


def test_tenants_are_admitted_in_turn() -> None:
    engine = make_engine(max_num_seqs=1)
    for i in range(4):
        engine.add_request(request(f"greedy{i}", [1, i], 2, tenant="greedy"))
    for i in range(2):
        engine.add_request(request(f"modest{i}", [2, i], 2, tenant="modest"))
    assert first_outputs(engine) == ["greedy0", "modest0", "greedy1", "modest1", "greedy2", "greedy3"]


def test_a_step_never_exceeds_its_budget_nor_the_number_of_sequences() -> None:
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=10)
    for i in range(8):
        engine.add_request(request(str(i), [i] * (3 * i + 1), 5))
    seen = 0
    while engine.has_work:
        step = engine.scheduler.schedule()
        assert sum(work.count for work in step) <= 10
        assert len(step) <= 3
        seen = max(seen, sum(work.count for work in step))
        token_ids = engine.runner.run(step, engine.cache.take_copies())
        engine._apply(step, token_ids)
        engine._outputs.clear()
    assert seen == 10


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    engine = make_engine(num_blocks=12, max_num_batched_tokens=8)
    engine.add_request(request("first", [1] * 40, 20))  # 5 blocks, 8 at the end
    engine.step()
    engine.add_request(
        request("second", [2] * 56, 2)
    )  # 7 blocks: its first chunk would fit, all of it would not
    for _ in range(6):
        engine.step()
    assert [sequence.request.request_id for sequence in engine.scheduler.running] == ["first"]
    run_to_end(engine)
    assert engine.stats().preemptions == 0


def test_nobody_overtakes_a_request_that_waits_for_room() -> None:
    engine = make_engine(num_blocks=12, max_num_batched_tokens=64)
    engine.add_request(request("first", [1] * 40, 20))
    engine.step()
    engine.add_request(request("large", [2] * 56, 2, tenant="a"))
    engine.add_request(request("small", [3] * 4, 2, tenant="b"))
    assert first_outputs(engine) == ["first", "large", "small"]


def test_the_latest_admitted_gives_way_and_is_first_in_line_again() -> None:
    engine = make_engine(num_blocks=8, max_num_seqs=3, max_model_len=56)
    for i, tenant in enumerate("abc"):
        engine.add_request(request(tenant, [i] * 7, 30, tenant=tenant))
    engine.step()
    assert [sequence.request.request_id for sequence in engine.scheduler.running] == ["a", "b", "c"]
    engine.add_request(request("d", [9], 1, tenant="d"))
    while engine.scheduler.preemptions == 0:
        engine.step()
    assert [sequence.request.request_id for sequence in engine.scheduler.running] == ["a", "b"]
    assert next(iter(engine.scheduler._waiting)) == "c"


def test_a_victim_that_brings_no_blocks_back_is_not_chosen() -> None:
    engine = make_engine(num_blocks=32, max_num_seqs=3)
    run_to_end(engine, request("seed", [5] * 17, generate=False))
    for name in ("own", "twin1", "twin2"):
        engine.add_request(request(name, [5] * 16 if name != "own" else [6] * 16, 9))
    engine.step()
    own, twin1, twin2 = engine.scheduler.running
    assert own.table is not None
    assert twin1.table is not None
    assert twin2.table is not None
    # Make the twins' tables one and the same, as after two full shared blocks and nothing else.
    twin2_blocks = twin2.table.block_ids
    twin1_blocks = list(twin1.table.block_ids)
    saved = list(twin2_blocks)
    twin2_blocks[:] = twin1_blocks
    assert engine.scheduler._choose_victim() is own
    twin2_blocks[:] = saved


def test_a_preempted_sequence_keeps_its_kv_while_nobody_needs_the_room() -> None:
    engine = make_engine()
    engine.add_request(request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 10))
    for _ in range(4):
        engine.step()
    (sequence,) = engine.scheduler.running
    known = len(sequence.token_ids)
    engine.scheduler.preempt(sequence)
    engine.step()
    assert sequence.table is not None
    assert sequence.table.reused == known - 1


def test_a_sequence_with_no_room_in_an_idle_pool_fails_instead_of_trying_for_ever() -> None:
    engine = make_engine(num_blocks=4, max_model_len=80)  # the books are wrong: the context exceeds the pool
    answer = run_to_end(engine, request("a", [1] * 60, 5))["a"]
    assert answer.last is not None
    assert answer.last.finish_reason == "error"
    assert "no room" in (answer.last.error or "")
    grown = run_to_end(engine, request("b", [1] * 20, 50))["b"]
    assert grown.last is not None
    assert grown.last.finish_reason == "error"
    assert engine.stats().blocks_free == 4


@pytest.mark.parametrize("count", [1, 3])
def test_a_stale_result_is_dropped(count: int) -> None:
    engine = make_engine()
    engine.add_request(request("a", [1, 2, 3], 9))
    for _ in range(count):
        engine.step()
    (sequence,) = engine.scheduler.running
    before = list(sequence.token_ids)
    outputs = engine.step(lambda: engine.scheduler.preempt(sequence))
    assert outputs == []
    assert sequence.token_ids == before
    engine.check_integrity()


def test_a_request_is_not_admitted_into_room_that_running_answers_are_about_to_need() -> None:
    engine = make_engine(num_blocks=12, max_num_batched_tokens=64)
    engine.add_request(request("first", [1] * 41, 20))  # 6 blocks now, 8 at the end
    engine.step()
    engine.add_request(request("second", [2] * 48, 2))  # fits into the other 6, but then the first would not
    engine.step()
    assert engine.scheduler.num_waiting == 1
    run_to_end(engine)
    assert engine.stats().preemptions == 0


def test_work_whose_sequence_gave_way_in_the_same_step_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    for name in "ab":
        engine.add_request(request(name, [1, 2, ord(name) % 50], 9))
    engine.step()
    first, second = engine.scheduler.running
    reserve = engine.cache.reserve

    def refuse_until_the_first_is_gone(table: Table, tokens: int) -> bool:
        return not (table is second.table and first in engine.scheduler.running) and reserve(table, tokens)

    monkeypatch.setattr(engine.cache, "reserve", refuse_until_the_first_is_gone)
    monkeypatch.setattr(engine.scheduler, "_choose_victim", lambda: first)
    assert [work.sequence for work in engine.scheduler.schedule()] == [second]


def test_what_a_sequence_computed_before_it_gave_way_does_not_count_as_reused() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request(request("a", list(range(30)), 2))
    engine.step()
    engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    answer = run_to_end(engine)["a"]
    assert answer.last is not None
    assert answer.last.prompt == PromptUsage(30, 0, 30)
