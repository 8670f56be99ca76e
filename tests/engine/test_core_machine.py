"""Random interleavings of everything that can happen to an engine, on a pool that is always too small."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.api import GenerateRequest
from engine.core import Engine
from tests.engine.support import FakeModel, Transcript, expected_answer, make_engine, request

# Few different tokens, so that prompts share prefixes, whole and partial blocks, all the time.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=30)
tenants = st.sampled_from(["a", "b"])
branches = st.sampled_from([None, "x", "y", "z"])


class EngineMachine(RuleBasedStateMachine):
    """Whatever happens around it, a request says what it would say alone, ends once, and leaves no block
    behind.
    """

    engine: Engine
    model: FakeModel

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, GenerateRequest] = {}
        self.heard: dict[str, Transcript] = {}
        self.aborted: set[str] = set()
        self.finished_contexts: list[tuple[str, list[int]]] = []
        self.broke = False

    @initialize(
        num_blocks=st.integers(6, 14),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 40),
        caching=st.booleans(),
    )
    def build(self, num_blocks: int, max_num_seqs: int, budget: int, caching: bool) -> None:
        self.model = FakeModel()
        self.engine = make_engine(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            model=self.model,
        )

    @property
    def unfinished(self) -> list[str]:
        return [name for name in self.asked if self.heard[name].last is None or not self.ended(name)]

    def ended(self, name: str) -> bool:
        last = self.heard[name].last
        return last is not None and last.finish_reason is not None

    def submit(self, asked: GenerateRequest) -> None:
        self.engine.add_request(asked)
        self.asked[asked.request_id] = asked
        self.heard[asked.request_id] = Transcript()

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 25),
        tenant=tenants,
        branch=branches,
        generate=st.booleans() | st.just(True),
        ignore_eos=st.booleans(),
    )
    def ask(
        self,
        prompt: list[int],
        max_tokens: int,
        tenant: str,
        branch: str | None,
        generate: bool,
        ignore_eos: bool,
    ) -> None:
        self.submit(
            request(
                str(len(self.asked)),
                prompt,
                max_tokens,
                tenant=tenant,
                branch=branch,
                generate=generate,
                ignore_eos=ignore_eos,
            )
        )

    @precondition(lambda self: self.finished_contexts)
    @rule(data=st.data(), extra=st.lists(st.integers(0, 1), min_size=1, max_size=3), branch=branches)
    def ask_again(self, data: st.DataObject, extra: list[int], branch: str | None) -> None:
        tenant, context = data.draw(st.sampled_from(self.finished_contexts))
        prompt = (context + extra)[-self.engine.info.max_model_len + 1 :]
        self.submit(request(str(len(self.asked)), prompt, 4, tenant=tenant, branch=branch))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.hear(self.engine.step())
            self.engine.check_integrity()

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data(), during_step=st.booleans())
    def abort(self, data: st.DataObject, during_step: bool) -> None:
        name = data.draw(st.sampled_from(self.unfinished))
        if during_step:
            self.hear(self.engine.step(lambda: self.engine.abort(name)))
        else:
            self.engine.abort(name)
            self.hear(self.engine.step())
        assert self.ended(name), "an abort takes effect within one step"
        self.aborted.add(name)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data(), during_step=st.booleans())
    def preempt(self, data: st.DataObject, during_step: bool) -> None:
        sequence = data.draw(st.sampled_from(self.engine.scheduler.running))
        if not during_step:
            self.engine.scheduler.preempt(sequence)
            return

        def between() -> None:
            if sequence in self.engine.scheduler.running:
                self.engine.scheduler.preempt(sequence)

        self.hear(self.engine.step(between))

    @rule(tenant=tenants, branch=branches.filter(lambda name: name is not None))
    def release(self, tenant: str, branch: str) -> None:
        self.engine.release(tenant, branch)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def break_the_next_forward(self) -> None:
        self.model.fail_at.add(self.model.calls)
        self.broke = True
        self.hear(self.engine.step())

    def hear(self, outputs: list) -> None:  # type: ignore[type-arg]
        for output in outputs:
            transcript = self.heard[output.request_id]
            transcript.add(output)
            asked = self.asked[output.request_id]
            if output.prompt is not None:
                usage = output.prompt
                assert usage.total == len(asked.prompt_ids) == usage.reused + usage.computed
                assert 0 <= usage.reused < usage.total
            if output.finish_reason in ("stop", "length"):
                expected = expected_answer(asked, self.engine.info.max_model_len) if asked.generate else []
                assert transcript.token_ids == expected
                self.finished_contexts.append((asked.tenant, asked.prompt_ids + transcript.token_ids))
            else:
                expected = expected_answer(asked, self.engine.info.max_model_len)
                assert transcript.token_ids == expected[: len(transcript.token_ids)]
            if output.finish_reason == "error":
                assert self.broke
                assert output.error == "RuntimeError: the model broke"

    @invariant()
    def books_add_up(self) -> None:
        self.engine.check_integrity()

    def teardown(self) -> None:
        while self.engine.has_work:
            self.hear(self.engine.step())
            self.engine.check_integrity()
        assert not self.unfinished, "a request never ended"
        for name in self.asked.keys() - self.aborted:
            last = self.heard[name].last
            assert last is not None
            assert last.finish_reason != "abort"
        stats = self.engine.stats()
        assert stats.blocks_free + stats.blocks_idle == stats.blocks_total
        assert sum(stats.finished.values()) == len(self.asked)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
