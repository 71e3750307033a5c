"""Sending: commands to the commitlog process, to store batches at once or in stages."""

from __future__ import annotations

from typing import Annotated, Final

from cometmq.protocol.commands.root import (
    Answer,
    Command,
    On,
    Part,
    ServedBy,
    Since,
    by_clients,
    publish,
)
from cometmq.protocol.integers import Int32, Int64

TIMED: Final = -1  # in place of a delay level


class Section(Part, frozen=True):
    """One batch for one queue: its elements stand in the payload frame of the same index."""

    topic: str
    queue_id: Int32
    count: Int64
    sys_flag: Int32 = 0
    wait: bool = True  # False: answer without waiting for flush or replica (RocketMQ's WAIT)
    # A sender numbers its attempts to send to a queue; 0: it does not. A fence says that it has
    # given up attempts with lower numbers, of which it does not know whether they came: those that
    # come later are not stored.
    number: Annotated[Int64, Since("0.2.0")] = 0
    fence: Annotated[bool, Since("0.2.0")] = False
    # How long they wait before they can be consumed: messageDelayLevel, 0: not at all, -1: each
    # says it by its property TIMER_DELIVER_MS or TIMER_DELAY_MS.
    delay_level: Annotated[Int32, Since("0.2.0")] = 0
    # It was sent before and not answered, and its sender has tried for so many ms at most when it
    # gives up; -1: never. What is stored of it already is not stored again. Such a section has a
    # fence, and its messages UNIQ_KEYs.
    repeats_ms: Annotated[Int64, Since("0.2.0")] = -1
    # One past the last message of this sender in the queue that it knows of; -1: it knows none.
    after: Annotated[Int64, Since("0.2.0")] = -1
    # They are half messages of transactions of that group of producers; the result tells where
    # those lie. "": they are none.
    producer_group: Annotated[str, Since("0.2.0")] = ""
    # A message is not stored if its topic has one with the same key that is no older than so many
    # ms, in whichever queue: the result tells where that lies. Each has one key then. 0: it is.
    window_ms: Annotated[Int64, Since("0.2.0")] = 0


class SendMessages(Command, frozen=True, tag=10):
    """Store batches, one payload frame a section, in RocketMQ's batch body layout.

    -> SendResult, one entry a section. A section is stored whole or not at all; but when the whole
    broker is killed before the answer, the first messages of a section may be found stored.
    """

    access = by_clients(
        publish("sections.topic", itemwise=True),
        publish("sections.producer_group", On.GROUP, is_optional=True, itemwise=True),
        later=True,
    )

    sections: list[Section]
    born_timestamp_ms: Int64
    born_host: str = ""  # "ip:port"; empty: unknown, stored as 0.0.0.0:0
    oneway: bool = False  # no answer is wanted
    # Who numbers the sections; a random number for each producer.
    sender: Annotated[Int64, Since("0.2.0")] = 0
    # Of a sender that has said OpenProducer. Sections are refused with ProducerFenced when another
    # one has opened the name since, with ProducerUnknown when nobody has in that epoch.
    producer_id: Annotated[str, Since("0.2.0")] = ""
    epoch: Annotated[Int64, Since("0.2.0")] = 0


class OpenProducer(Command, frozen=True, tag=17):
    """From now on this sender alone has that name. -> ProducerOpened

    Once it is answered nothing is stored any more of senders with an older epoch of the name; that
    outlives what a stored message outlives. A command that comes again is answered alike.

    With an epoch: register the name again with it, after ProducerUnknown or at one more broker.
    Raises ProducerFenced if another sender has the same epoch or a newer one, and ArgumentIllegal
    for an epoch more than ten years ahead of this broker's clock, which no broker has assigned.
    """

    access = by_clients(publish("producer_id", On.PRODUCER), later=True)
    new_in = "0.2.0"

    producer_id: str
    sender: Int64
    epoch: Int64 = 0  # 0: one above all before it


class ProducerOpened(Answer, frozen=True, tag=18):
    code: Int32  # 0; or as in a SectionResult: stored, but not as safe as it should be
    epoch: Int64 = 0  # the broker's clock in ms, unless one as new was there already
    text: str = ""


class Copy(Part, frozen=True):
    """A message of a section was not stored (Section.window_ms): the first one lies there."""

    index: Int32  # of the message in its section
    queue_id: Int32
    queue_offset: Int64
    msg_id: str = ""  # of the first one; "": it is a long one
    store_timestamp_ms: Int64 = 0  # 0: it was stored just now


class SectionResult(Part, frozen=True):
    code: Int32  # 0 = stored; 10 = stored, but not yet on the disk; else an error's code
    queue_offset: Int64 = -1  # of the first message; the others follow
    physical_offset: Int64 = -1  # of the first message
    text: str = ""
    # Where a whole broker was killed while it stored them: the first `head` messages lie as said
    # above, and those behind them, which a repeat has stored, from `rest_queue_offset` on. 0: all
    # lie as said above.
    head: Annotated[Int32, Since("0.2.0")] = 0
    rest_queue_offset: Annotated[Int64, Since("0.2.0")] = -1
    # Of each message, where they are half messages.
    physical_offsets: Annotated[list[Int64], Since("0.2.0")] = []
    # The time from which TIMER_DELAY_MS counts; 0: no message has that property, or the time is not
    # known, for a repeat to an older broker.
    timed_ms: Annotated[Int64, Since("0.2.0")] = 0
    # The messages that were there, by their index; the offsets above count the others alone.
    copies: Annotated[list[Copy], Since("0.2.0")] = []


class SendResult(Answer, frozen=True, tag=11):
    results: list[SectionResult]
    store_timestamp_ms: Int64 = 0
    store_host: str = ""


# Staged: batches that nobody sees until one command stores all of them, once. A *sink* numbers its
# commits by epochs; what it sends for one lies in stages, a stage for each attempt of each task.


class StageMessages(Command, frozen=True, tag=12):
    """Put batches behind the `first` ones that a stage has, one payload frame a section. -> Done

    A stage is made by its first batch. What it has already is passed over, so that a command whose
    answer was lost may come again. What is not committed is dropped after `stagedLease`.

    Args:
        epoch: of the commit that these batches are for. A sink counts its commits from 0, with gaps
            if it likes, or takes the time in ms; BadRequest for one that is more than ten years
            ahead of this broker's clock.
    """

    access = by_clients(
        publish("sink", On.SINK),
        publish("sections.topic"),
        publish("sections.producer_group", On.GROUP, is_optional=True),
    )

    sink: str
    epoch: Int64
    stage: str
    first: Int64
    sections: list[Section]
    born_timestamp_ms: Int64
    born_host: str = ""


class CloseStage(Command, frozen=True, tag=13):
    """The stage is whole with so many batches. -> Done, once it is on the disk."""

    access = by_clients(publish("sink", On.SINK), later=True)

    sink: str
    epoch: Int64
    stage: str
    batches: Int64


class CommitStages(Command, frozen=True, tag=14):
    """Store what these closed stages hold, all of it, once. -> StagesCommitted

    An epoch that is not above the last one that was committed is not stored again. All other
    stages of this epoch and of those before are dropped. A count that is more than a million below
    the last epoch is no repeat: if its stages are there, the sink begins anew with it.
    """

    access = by_clients(publish("sink", On.SINK))

    sink: str
    epoch: Int64
    stages: list[str]


class StagesCommitted(Answer, frozen=True, tag=15):
    already: bool  # by an earlier command; these stages were not looked at
    messages: Int64 = 0


class DropStages(Command, frozen=True, tag=16):
    """Forget stages that will not be committed; a stage that is not there is no error. -> Done"""

    access = by_clients(publish("sink", On.SINK))

    sink: str
    epoch: Int64
    stages: list[str]


class GetLine(Command, frozen=True, tag=94):
    """Where this process listens to clients of its machine without ZeroMQ between. -> LineAddress

    Refused with NotLocal unless the client names the boot of this very machine, and speaks by a
    stream: before 0.2.0 local connections carried packets of at most 64 KiB.
    """

    access = by_clients(served_by=ServedBy.EVERY)

    boot_id: str
    is_stream: Annotated[bool, Since("0.2.0")] = False


class LineAddress(Answer, frozen=True, tag=95):
    name: str  # of a Unix socket, in the abstract namespace
    uid: Int64  # the user who listens there, and the only one, beside root, who is let in
    is_stream: Annotated[bool, Since("0.2.0")] = False
