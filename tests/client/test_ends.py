"""Ends of transactions on their way to a broker that moves."""

from __future__ import annotations

import contextlib

import pytest
from client_fakes import fake_broker

from cometmq.client.routes import Routes
from cometmq.client.sending import ends
from cometmq.client.sending.ends import Ending, Ends
from cometmq.protocol.commands import TransactionEnd
from cometmq.protocol.errors import NotConfirmed

ATTEMPT_S = 0.2


def ending(name: str, timeout_s: float) -> Ending:
    return Ending("b", "t", TransactionEnd(name, True, []), timeout_s)


def test_after_an_end_that_was_given_up_the_next_one_goes_where_the_messages_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One attempt is all the time there is; the next transaction's message finds the new master."""
    monkeypatch.setattr(ends, "ATTEMPT_S", ATTEMPT_S)
    with fake_broker(topics=["t"]) as first, fake_broker() as second:
        with contextlib.closing(Routes(first.address)) as routes:
            those = Ends("shops", routes)
            those.end(ending("1", 30.0))
            first.broker.tells_ends = False
            with pytest.raises(NotConfirmed, match="transaction 2 is committed"):
                those.end(ending("2", ATTEMPT_S / 2))
            first.broker.moved_to = second.address
            routes.refresh("t")  # as a send does that fails
            those.end(ending("3", ATTEMPT_S / 2))
        assert [end.transaction_id for end in second.broker.ends] == ["3"]
