"""Routing of requests: load, prefix affinity, limits of slots and cache, suspended engines."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from roll_core.config.rollout import RolloutConfig
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.rollout.router import Completed, DeadRoles, RolloutEvent, Router
from roll_core.types.trajectory import Ending


@dataclass
class ManualEngine:
    """Engine that returns a completion when the test puts it into `ended`."""

    name: str
    ended: asyncio.Queue[Completion] = field(default_factory=asyncio.Queue)

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        for _ in requests:
            yield [await self.ended.get()]

    async def abort(self, request_ids: list[str]) -> None: ...


def request(group: int, number: int, prompt_tokens: int = 1) -> GenerationRequest:
    return GenerationRequest(f"{group}/{number}", (1,) * prompt_tokens, 4, 1.0, (1,), number)


def router(*names: str, slots: int = 64, **settings: object) -> Router:
    config = RolloutConfig(slots_per_engine=slots, **settings)
    return Router([ManualEngine(name) for name in names], config, DeadRoles(), lambda event: None)


def routed(among: Router, group: int, count: int, first: int = 0) -> list[str | None]:
    """Names of the engines that get the attempts of a group; None where no engine has a free slot."""
    return [among.assign(group, request(group, number)) for number in range(first, first + count)]


def test_a_group_stays_with_one_engine_and_the_next_goes_to_the_least_loaded():
    two = router("a", "b")
    assert routed(two, group=0, count=8) == ["a"] * 8
    assert routed(two, group=1, count=4) == ["b"] * 4
    assert routed(two, group=2, count=2) == ["b"] * 2
    assert routed(two, group=0, count=1, first=8) == ["a"]


def test_a_group_leaves_an_engine_that_has_much_more_load():
    two = router("a", "b", slots=8)  # a quarter of 8 slots is the margin
    assert routed(two, group=0, count=5) == ["a", "a", "a", "b", "b"]


def test_engines_get_slightly_more_requests_than_they_have_slots():
    one = router("a", slots=4)
    assert routed(one, group=0, count=6) == ["a"] * 5 + [None]


def test_engines_get_no_more_tokens_than_their_cache_holds():
    """Each request may become 5 tokens long."""
    one = router("a", tokens_per_engine=12)
    assert routed(one, group=0, count=4) == ["a"] * 3 + [None]
    assert routed(router("a", tokens_per_engine=1), group=0, count=2) == ["a", None]  # an idle engine always gets one


def test_an_engine_that_was_suspended_gets_nothing_until_it_is_resumed():
    two = router("a", "b")
    assert routed(two, group=0, count=2) == ["a"] * 2
    assert two.suspend(["a"]) == ["0/0", "0/1"]
    assert routed(two, group=0, count=2, first=2) == ["b"] * 2
    assert not two.is_idle(["a"])
    two.resume(["a"])
    assert routed(two, group=1, count=1) == ["a"]


def test_attempts_come_back_as_they_finish():
    async def emitted() -> list[list[str]]:
        engine, events = ManualEngine("a"), []

        def emit(event: RolloutEvent) -> None:
            assert isinstance(event, Completed)
            events.append([completion.request_id for completion in event.completions])

        one = Router([engine], RolloutConfig(), DeadRoles(), emit)
        for group, number in ((0, 0), (0, 1), (1, 0), (1, 1)):
            one.assign(group, request(group, number))
        one.send()
        for request_id in ("1/1", "0/1", "1/0", "0/0"):
            engine.ended.put_nowait(Completion(request_id, (1,), (0.0,), (0,), Ending.STOP))
        while not one.is_idle(["a"]):
            await asyncio.sleep(0)
        return events

    assert asyncio.run(emitted()) == [["1/1"], ["0/1"], ["1/0"], ["0/0"]]
