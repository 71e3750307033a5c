"""What can go wrong between a client and a broker. The code on the wire is the contract.

CometError
├── Refused                    the broker took nothing; `retriable` says whether to try again
│   ├── MessageIllegal         a message that no store will ever take
│   │   ├── MessageTooLarge    size: body, record or properties
│   │   ├── NameIllegal        name: topic or group
│   │   └── QueueNotExist      the topic does not have that queue
│   ├── TopicNotExist
│   ├── TopicExists            with other settings than asked for
│   ├── TooManyTopics          maxTopics
│   ├── MessagesUnread         the change would hide them
│   ├── GroupNotExist
│   ├── GroupExists            with other settings than asked for
│   ├── GroupInUse             it has members
│   ├── TooManyGroups          maxGroups
│   ├── NoPermission
│   ├── NotMaster              a slave takes nothing but what its master sends
│   ├── InSyncReplicasNotEnough  too few replicas of the group are in sync
│   ├── SystemBusy             too much is waiting; retry
│   ├── ServiceNotAvailable    not writable just now
│   │   ├── DiskFull           disk: over the mark, or no room for the next segment
│   │   └── ShuttingDown       shutdown: the broker is stopping
│   ├── SubscriptionIllegal
│   │   ├── FilterIllegal      an SQL92 expression with a syntax error
│   │   └── SubscriptionsDiffer  from those of other members, in a group that refuses it
│   ├── FiltersOff             enablePropertyFilter is false
│   ├── OffsetIllegal
│   ├── MessageNotFound
│   ├── TransactionUnknown     no half message of that group lies there
│   ├── TransactionFinished    it has ended otherwise
│   ├── TransactionIncomplete  one of its messages failed
│   ├── RequesterGone          nobody waits for that reply any more
│   ├── Overtaken              a later message of the same producer came to that queue before
│   ├── ProducerFenced         a newer process has the same producer_id
│   ├── ProducerUnknown        the broker does not know that producer_id any more
│   ├── HandleUnknown          no messages are popped under that handle now
│   ├── TooLate                the message is delivered, or about to be: no recall
│   ├── NotOwner               the queue belongs to another member of the group now
│   └── BadRequest             a frame or command that cannot be understood
│       ├── UnknownCommand
│       └── UnsupportedVersion
├── NotConfirmed               the broker may have taken it: an answer did not come in time
│   ├── FlushDiskTimeout       it is stored, but not yet on the disk
│   ├── FlushSlaveTimeout      it is stored, but no slave has acknowledged it in time
│   └── SlaveNotAvailable      it is stored, but there is no slave to wait for
├── RequestTimeout             no reply came within the request's time
├── NotReachable               nobody answers at that address
├── ClientClosed               the client was closed, before the call or during it
│   └── ClosedUnconfirmed      the broker may have carried it out; also NotConfirmed
├── NotMapped                  transport="mapped", and the broker's store cannot be read from here
├── NotLocal                   transport="local", and the broker has no line for this process
├── MonkeyPatched              gevent or eventlet has replaced Python's threads and sockets
├── TooFewDescriptors          this process may not open as many as it needs (ulimit -n)
├── BodyIllegal                a compressed body that cannot be unfolded
│   └── CodecMissing           it needs an extra that is not installed
├── ConfigError                a setting that cannot be used, or a file of settings
├── ArgumentIllegal            a call with something that can be no such argument
└── StoreError                 a store directory that cannot be opened
    ├── StoreLocked
    ├── StoreNotOurs           a file that does not belong there, or has the wrong size
    └── StoreDamaged
"""

from __future__ import annotations

from typing import Any, ClassVar

from cometmq.protocol.rebuilding import rebuilt


class CometError(Exception):
    """The root. `code` is RocketMQ's response code where it has one, ours start at 9000.

    9000 to 9039 are the errors of this page, 9040 to 9059 those that Spark's side adds, and from
    9070 on those of groups. An error without a code of its own travels as the class that it is made
    of.
    """

    stored: int = 0  # of a call that sends many: how many messages are stored all the same
    code: ClassVar[int] = 1  # RocketMQ SYSTEM_ERROR
    retriable: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (type(self), self.args, self.__dict__)


class Refused(CometError):
    """The request was not carried out; nothing was stored."""

    code = 9000


class MessageIllegal(Refused):
    """A message that the store will never take: no body, properties that cannot be written."""

    code = 13  # RocketMQ MESSAGE_ILLEGAL


class MessageTooLarge(MessageIllegal):
    """Over maxMessageSize, or properties over 32,767 bytes. The text holds both numbers."""

    code = 9001


class NameIllegal(MessageIllegal):
    """A topic or group name that is empty, too long or has other characters than %|a-zA-Z0-9_-."""

    code = 9002


class QueueNotExist(MessageIllegal):
    """The topic does not have that queue (any more). The text names both.

    A producer that chose the queue by itself fetches the route and chooses again.
    """

    code = 9053


class TopicNotExist(Refused):
    """No broker has the topic, and none may create it (autoCreateTopicEnable)."""

    code = 17  # RocketMQ TOPIC_NOT_EXIST
    retriable = True


class TopicExists(Refused):
    """The topic is there, with other settings; the text names both. Changing is an update."""

    code = 9050


class TooManyTopics(Refused):
    """The broker has as many topics as maxTopics allows."""

    code = 9051


class MessagesUnread(Refused):
    """With fewer queues, messages would be hidden that a group has not read; the text says which.

    Nothing was changed. Update by force does it all the same.
    """

    code = 9052


class GroupNotExist(Refused):
    """No broker knows the group, and none may create it (autoCreateSubscriptionGroup)."""

    code = 26  # RocketMQ SUBSCRIPTION_GROUP_NOT_EXIST


class GroupExists(Refused):
    """The group is there, with other settings; the text names both. Changing is an update."""

    code = 9070


class GroupInUse(Refused):
    """The group has members; the text names some. Nothing was changed.

    End them first. Force does it all the same: the members that go on begin anew.
    """

    code = 9071


class HandleUnknown(Refused):
    """Nothing is popped under that handle: its time is over, or it never was. The message comes
    again, or has gone to somebody else."""

    code = 9074


class TooManyGroups(Refused):
    """The broker has as many groups as maxGroups allows."""

    code = 9072


class NoPermission(Refused):
    """The topic is not writable or not readable (perm), or the group may not consume."""

    code = 16  # RocketMQ NO_PERMISSION


class NotMaster(Refused):
    """This broker is a slave: it serves what it has. The text names its master, which takes it."""

    code = 9122
    retriable = True


class InSyncReplicasNotEnough(Refused):
    """Of a group of replicas fewer are in sync than must have a message before it is acknowledged.
    Retry once they are back."""

    code = 9123
    retriable = True


class SystemBusy(Refused):
    """More is waiting than the broker may hold. Retry after a moment."""

    code = 2  # RocketMQ SYSTEM_BUSY
    retriable = True


class ServiceNotAvailable(Refused):
    """Not writable just now. Another broker, or the same one later, may take it."""

    code = 14  # RocketMQ SERVICE_NOT_AVAILABLE
    retriable = True


class DiskFull(ServiceNotAvailable):
    """No room for the next segment, or the disk is over diskSpaceWarningLevelRatio."""

    code = 9003


class ShuttingDown(ServiceNotAvailable):
    """The broker is stopping and takes nothing more."""

    code = 9004


class SubscriptionIllegal(Refused):
    """A tag expression that cannot be read; or more topics than a member may have, 5,000."""

    code = 23  # RocketMQ SUBSCRIPTION_PARSE_FAILED


class SubscriptionsDiffer(SubscriptionIllegal):
    """Other members of the group subscribe to other tags, and the group refuses that.

    The text names one of the topics and both expressions. See the group's `sameSubscriptions`.
    """

    code = 9073


class FilterIllegal(SubscriptionIllegal):
    """An SQL92 expression that cannot be read, or is too large; the text has line and column."""

    code = 9015


class FiltersOff(Refused):
    """An SQL92 expression at a broker whose enablePropertyFilter is false."""

    code = 9016


class OffsetIllegal(Refused):
    """An offset outside the queue."""

    code = 9005


class MessageNotFound(Refused):
    """No record begins at that offset, or it has been deleted."""

    code = 22  # RocketMQ QUERY_NOT_FOUND


class NotOwner(Refused):
    """The queue was given to another member of the group. Not raised to single readers."""

    code = 9006


class Overtaken(Refused):
    """Its producer had given it up, and a later message to that queue came before it."""

    code = 9013
    retriable = True


class ProducerFenced(Refused):
    """A producer that was started later has the same `producer_id`; the text names both epochs.

    Nothing was stored, and nothing of this producer is any more. It has been replaced: end it.
    """

    code = 9120


class ProducerUnknown(Refused):
    """The broker does not know that `producer_id`, or only an older epoch of it; both are named.

    It has lost them (a loss of power under ASYNC_FLUSH), has forgotten them, or was away when the
    producer began. A producer says again who it is, and sends again.
    """

    code = 9121
    retriable = True


class TransactionUnknown(Refused):
    """No half message of that transaction lies there; the text says what was asked for and what is
    there."""

    code = 9090


class TransactionFinished(Refused):
    """The transaction has ended already, in another way; the text names both."""

    code = 9091


class TransactionIncomplete(Refused):
    """A message of the transaction failed: it can only be rolled back; the block's end does it."""

    code = 9092


class RequesterGone(Refused):
    """Nobody waits for that reply any more: the requester was closed, has ended or does not answer.

    The text names the request.
    """

    code = 9110


class BadRequest(Refused):
    """A frame that is truncated, oversized or not a command."""

    code = 9007


class UnknownCommand(BadRequest):
    """A command that this process does not take."""

    code = 3  # RocketMQ REQUEST_CODE_NOT_SUPPORTED


class UnsupportedVersion(BadRequest):
    """The client speaks another version of the protocol. The text names both."""

    code = 9008


class NotConfirmed(CometError):
    """No answer in time. The message may be stored: sending it again may store it twice."""

    code = 9010
    retriable = True


class FlushDiskTimeout(NotConfirmed):
    """SYNC_FLUSH: stored and visible, but the disk did not confirm within syncFlushTimeout."""

    code = 10  # RocketMQ FLUSH_DISK_TIMEOUT


class FlushSlaveTimeout(NotConfirmed):
    """SYNC_MASTER: stored and visible, but too few slaves acknowledged it within slaveTimeout."""

    code = 12  # RocketMQ FLUSH_SLAVE_TIMEOUT


class SlaveNotAvailable(NotConfirmed):
    """SYNC_MASTER: stored and visible, but too few slaves are connected and close enough."""

    code = 11  # RocketMQ SLAVE_NOT_AVAILABLE


class RequestTimeout(CometError, TimeoutError):
    """No reply came in time. The text names the request and the time, and whether it is known to be
    stored. It may be answered yet: that reply is counted, and dropped."""

    code = 9111


class NotReachable(CometError):
    """Nobody answers at the address; the text names it."""

    code = 9011
    retriable = True


class ClientClosed(CometError, RuntimeError):
    """A client's method was called after `close`, or during a `close` in another thread. Nothing
    was stored; otherwise the error is ClosedUnconfirmed. It is also a RuntimeError."""

    code = 9035


class ClosedUnconfirmed(ClientClosed, NotConfirmed):
    """The client was closed before the broker answered: the request may have been carried out, and
    a message may be stored."""

    code = 9036
    retriable = False


class NotMapped(CometError):
    """`transport="mapped"` was asked for, and this process cannot map the broker's store.

    The text says why: another machine, no permission, another file at that place, an old kernel.
    """

    code = 9030


class NotLocal(CometError):
    """`transport="local"` was asked for, and the broker has no line for this process.

    The text says why: another machine, another user, another release.
    """

    code = 9031


class MonkeyPatched(CometError, RuntimeError):
    """gevent or eventlet has replaced threads, locks, sockets or `select` of this process. Clients
    and Brokers wait in native code, where greenlets do not switch, so they would not receive
    answers. The text names the replaced modules and what to do."""

    code = 9037


class TooFewDescriptors(CometError):
    """This process may not have as many descriptors open as it needs; the text says how many there
    are, how many more are needed, and for what.

    Not raised by a broker for the connections of its clients: those that it has no descriptor for
    are refused, and it goes on.
    """

    code = 9034


class BodyIllegal(CometError, ValueError):
    """A body whose flags say that it is compressed, and that is not, or unfolds to too much.

    The text names the message. It was delivered as it was sent: `stored_body` has its bytes.
    """

    code = 9032


class CodecMissing(BodyIllegal):
    """Compression by a package that is not installed; the text says how to install it."""

    code = 9033


class TooLate(Refused):
    """What was to be recalled is delivered, or so near to it that nothing can hold it up."""

    code = 9060


class ConfigError(CometError):
    """A setting that cannot be used: wrong type, out of range, at odds with another one.

    Also for a configuration file that cannot be read, and for a key that nearly equals a known one.
    A key that nobody knows is only a warning. `problems` holds every fault that was found, one line
    each.
    """

    code = 9012

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class ArgumentIllegal(CometError, ValueError, TypeError):
    """A call with an argument of a wrong type, or with a value that it cannot have.

    Nothing was done. The text names the argument, what was given and what it takes. It is also a
    ValueError and a TypeError, as Python's own functions would raise.
    """

    code = 9014


class StoreError(CometError):
    """A store directory that cannot be opened or used."""

    code = 9020


class StoreLocked(StoreError):
    """Another process holds the store's `lock`; the text names it."""

    code = 9021


class StoreNotOurs(StoreError):
    """A file that has no place in a store, or a segment of the wrong size."""

    code = 9022


class StoreDamaged(StoreError):
    """Bytes that are not what they must be; the text names file and offset."""

    code = 9023


def _tree(root: type[CometError]) -> dict[int, type[CometError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        for code, error in _tree(child).items():
            assert found.get(code, error) is error, f"{error.__name__} reuses the code {code}"
            found[code] = error
    return found


BY_CODE = _tree(CometError)


def from_code(code: int, text: str) -> CometError:
    """The exception that an error answer stands for."""
    return BY_CODE.get(code, CometError)(text)


def again(error: CometError) -> CometError:
    """An error to be raised in one more place; the exceptions of several threads stay apart."""
    return rebuilt(type(error), error.args, error.__dict__).with_traceback(None)
