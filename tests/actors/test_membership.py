"""Members of groups: until when a pop consumer is one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cometmq.actors.coordination import membership
from cometmq.actors.coordination.membership import Kind, Membership
from cometmq.actors.coordination.poppers import Poppers
from cometmq.protocol.commands import POP_WAIT_MS_MAX, PopMessages
from cometmq.protocol.configs import SubscriptionGroupConfig

SESSION_S, INVISIBLE_MS = 10.0, 60_000


@pytest.mark.parametrize("wait_ms", [-(2**62), 0, POP_WAIT_MS_MAX, 2**62])
def test_pop_consumer_is_a_member_for_no_longer_than_its_pop_is_held(
    wait_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one command with a far wait would keep members that share queues out for ever."""
    found = Membership()
    members: Any = SimpleNamespace(
        membership=found,
        config_of=lambda name: SubscriptionGroupConfig(group_name=name),
        active=lambda _name: [],
        filters=SimpleNamespace(register=lambda *_: None),
    )
    poppers = Poppers(members, session_s=SESSION_S, filters_on=True)
    request: Any = SimpleNamespace(sender=b"connection")
    now = [1_000.0]
    monkeypatch.setattr(membership.time, "monotonic", lambda: now[0])
    pop = PopMessages("g", "t", invisible_ms=INVISIBLE_MS, wait_ms=wait_ms, consumer="c")
    poppers.note(pop, request)
    held_ms = min(max(0, wait_ms), POP_WAIT_MS_MAX)
    now[0] += (held_ms + INVISIBLE_MS) / 1000 - 0.001
    assert not found.take_expired(Kind.POPS)
    now[0] += 0.002
    assert [each.name for each in found.take_expired(Kind.POPS)] == ["c"]
