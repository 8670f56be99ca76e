"""Branch names follow conversations, are bounded, and are given back."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from engine.api import EngineDead
from sessions import Sessions, planner, tokens
from sessions.branches import Branches
from sessions.prompt import PromptBuilder, Segment
from sessions.tree import TurnNode
from tests.sessions.support import ScriptedEngine, finished, spec

pytestmark = pytest.mark.anyio

NOTHING = Segment(tokens.ids(), tokens.ids())


def node(name: str, branch: str | None, parent: TurnNode | None = None) -> TurnNode:
    return TurnNode(name, "ann", parent, (), None, NOTHING, tokens.ids(), "completed", branch=branch)


async def test_a_branch_goes_along_with_its_newest_turn(engine: ScriptedEngine) -> None:
    branches = Branches(engine)
    assert branches.take("ann", None, "r1", "r1") == "r1"
    first = node("r1", "r1")
    assert branches.take("ann", first, "r2", "r2") == "r1"
    assert branches.take("ann", first, "r3", "r3") == "r3", "its branch has gone on without it"
    assert branches.take("ann", node("r2", "r1", first), "r4", "r4") == "r1"
    branches.release_tip(node("r2", "r1", first))
    await branches.close()
    assert not engine.released, "the branch ends elsewhere"
    branches.release_tip(node("r4", "r1"))
    await branches.close()
    assert engine.released == [("ann", "r1")]


async def test_a_turn_that_came_to_nothing_leaves_the_branch_where_it_was(engine: ScriptedEngine) -> None:
    branches = Branches(engine)
    branches.take("ann", None, "r1", "r1")
    first = node("r1", "r1")
    branches.take("ann", first, "r2", "r2")
    branches.give_up("ann", "r1", first)
    assert branches.take("ann", first, "r3", "r3") == "r1"
    branches.take("ann", first, "r4", "r4")
    branches.give_up("ann", "r4", first)
    await branches.close()
    assert engine.released == [("ann", "r4")]


async def test_the_branch_used_least_is_given_back(engine: ScriptedEngine) -> None:
    branches = Branches(engine, limit=2)
    for name in ("r1", "r2", "r3"):
        branches.take("ann", None, name, name)
    await branches.close()
    assert engine.released == [("ann", "r1")]


async def test_an_engine_that_is_gone_has_nothing_to_release(engine: ScriptedEngine) -> None:
    async def dead(tenant: str, branch: str) -> None:
        raise EngineDead

    engine.release = dead  # type: ignore[method-assign]
    branches = Branches(engine)
    branches.take("ann", None, "r1", "r1")
    branches.release("ann", "r1")
    await branches.close()


async def test_owners_with_equal_names_do_not_meet(engine: ScriptedEngine) -> None:
    branches = Branches(engine)
    branches.take("ann", None, "r1", "r1")
    other = dataclasses.replace(node("r1", "r1"), owner="eve")
    assert branches.take("eve", other, "r2", "r2") == "r2"


async def test_long_texts_are_encoded_beside_the_event_loop(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    encode = PromptBuilder.first

    def noted(*args: object, **fields: object) -> Segment:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(*args, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(PromptBuilder, "first", noted)
    monkeypatch.setattr(planner, "LONG_TEXT", 1000)
    await finished(sessions, spec("short"))
    await finished(sessions, spec("long " * 300))
    assert threads == [True, False]
