"""Administration of topics, groups, messages and retention, on all brokers of a name server."""

from __future__ import annotations

from cometmq.client.administration.messages import MessageAdmin
from cometmq.client.administration.retention import RetentionAdmin
from cometmq.client.administration.topics import TopicAdmin
from cometmq.client.dead_letters import DeadLetterAdmin
from cometmq.client.scheduled import ScheduledAdmin
from cometmq.protocol.wire.uninterrupted import uninterrupted_class


@uninterrupted_class()
class Admin(TopicAdmin, DeadLetterAdmin, MessageAdmin, RetentionAdmin, ScheduledAdmin):
    """Topics, groups, offsets and single messages, on all brokers of a name server.

        with Admin("127.0.0.1:9876") as admin:
            admin.create_topic("orders", queues=16)
            print(admin.describe_group("billing").lag)

    Threads may share it. Every method asks and waits, at most `timeout_s` for each answer, and
    raises NotReachable or NotConfirmed when none comes. What concerns several brokers is done one
    by one: when it raises, some may have done it; doing it again does no harm.

    Args:
        name_server: "host:port", a ZeroMQ address, or several (a list, or separated by ";").
        timeout_s: for one answer.
    """
