"""What may stand as a tag expression, and what is surely meant to be something else."""

from __future__ import annotations

import pytest
from cli_process import run
from client_fakes import fake_broker

from cometmq.client import Consumer
from cometmq.protocol.errors import SubscriptionIllegal
from cometmq.protocol.tags import check_expression

SQL = [
    "price > 10",
    "price>10",
    "a <> b",
    "TAGS = 'paid'",
    "region='eu'",
    "a = b",
    "a =5",
    "level=5",
    "a=-1.5",
    "TAGS IS NOT NULL AND TAGS IN ('paid', 'refunded')",
    "a in (1, 2)",
    "a is null",
    "paid || price BETWEEN 1 AND 5",
]
TAGS = ["*", "", "paid", "paid || refunded", "k=v", "in", "terms and conditions", "a-b_c", "ü || 1"]


@pytest.mark.parametrize("expression", SQL)
def test_sql_is_refused_with_what_to_do(expression: str) -> None:
    with pytest.raises(SubscriptionIllegal, match=r"SQL92 expression.* given as sql="):
        check_expression(expression)


@pytest.mark.parametrize("expression", TAGS)
def test_tags_are_taken(expression: str) -> None:
    check_expression(expression)


def test_a_consumer_refuses_sql() -> None:
    with fake_broker() as broker:
        with pytest.raises(SubscriptionIllegal, match="SQL92"):
            Consumer(broker.address, "g", "t", "price > 10")
        with Consumer(broker.address, "g", "t") as consumer:
            with pytest.raises(SubscriptionIllegal, match="SQL92"):
                consumer.subscribe("t", "price > 10")
            assert len(consumer._receiver.owned.subscriptions()) == 1


@pytest.mark.parametrize("group", [[], ["-g", "g"]])
def test_the_command_line_refuses_sql(group: list[str]) -> None:
    with fake_broker() as broker:
        Consumer(broker.address, "other", "t").close()  # makes the topic
        at = {"COMETMQ_NAME_SERVER": broker.address}
        refused = run("msg", "tail", "-t", "t", "--tags", "price > 10", *group, **at)
    assert refused.returncode == 1
    assert b"SQL92" in refused.stderr
