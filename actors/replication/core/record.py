"""The group's record: the few facts that its replicas must agree on. Pure: no I/O.

It lies in the coordination engine and is changed by compare-and-set on its version alone. Whoever
changes it takes the latest one that it knows, makes one of the edits below, and sends the whole.
Rules 1, 7, 8 and 9 of docs/replication.md say when an edit is right; here stands what it does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Final

import msgspec

from cometmq.conf.group import ID_MAX, REPLICAS_MAX, Id, impossible, is_peer
from cometmq.protocol.errors import ConfigError

RECORD_BYTES_MAX: Final = 64 << 10
ADDRESS_MAX: Final = 255
INT64_MAX: Final = (1 << 63) - 1
INCARNATION_MAX: Final = (1 << 31) - 1  # a session's nonce has it as its upper half

Whole = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
Incarnation = Annotated[int, msgspec.Meta(ge=0, le=INCARNATION_MAX)]
StoreUuid = Annotated[str, msgspec.Meta(max_length=36)]

Life = tuple[str, str, int]  # replica, store_uuid, incarnation: what a session stands for


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica as it has registered itself. Until then `store_uuid` is empty."""

    address: Annotated[str, msgspec.Meta(max_length=ADDRESS_MAX)]
    store_uuid: StoreUuid = ""
    incarnation: Incarnation = 0  # starts of that store; grows


class GroupRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the engine keeps of a group. Nothing in it is changed in place.

    `iss`, the in-sync set: whoever is in it has every confirmed byte. `elr`, eligible leader
    replicas (KIP-966): who has left it while it was too small to confirm anything; they have every
    confirmed byte as well. `master` is empty from the moment its process has started anew.
    """

    group: Id
    epoch: Whole = 0  # of the mastership; 0: there was none yet
    master: Annotated[str, msgspec.Meta(max_length=ID_MAX)] = ""
    replicas: Annotated[dict[Id, Member], msgspec.Meta(max_length=REPLICAS_MAX)]
    iss: Annotated[tuple[Id, ...], msgspec.Meta(max_length=REPLICAS_MAX)]
    elr: Annotated[tuple[Id, ...], msgspec.Meta(max_length=REPLICAS_MAX)] = ()
    min_iss: Whole

    def life(self, replica: str) -> Life | None:
        """What a session of that replica stands for; None: it is none of the group's."""
        member = self.replicas.get(replica)
        return None if member is None else (replica, member.store_uuid, member.incarnation)


_encode: Final = msgspec.json.Encoder(order="deterministic").encode
_decode: Final = msgspec.json.Decoder(GroupRecord).decode


def encode_record(record: GroupRecord) -> bytes:
    return _encode(record)


def decode_record(content: bytes) -> GroupRecord:
    """Raises ConfigError for what is no record, or one of an impossible group."""
    if len(content) > RECORD_BYTES_MAX:
        raise ConfigError(
            f"the group's record has {len(content)} bytes, at most {RECORD_BYTES_MAX}"
        )
    try:
        record = _decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the group's record cannot be read: {error}") from None
    problems = faults_of(record)
    if problems:
        raise ConfigError(*problems)
    return record


# --- judging --------------------------------------------------------------------------------------


def faults_of(record: GroupRecord) -> list[str]:
    """Why such a record cannot be; empty if it can."""
    members = [(name, member.address) for name, member in record.replicas.items()]
    problems = impossible(members, record.min_iss)
    for what, names in (("iss", record.iss), ("elr", record.elr)):
        unknown = sorted(set(names) - set(record.replicas))
        if unknown:
            problems.append(f"{what} names {', '.join(unknown)}, of which there is no replica")
        if len(set(names)) < len(names):
            problems.append(f"{what} names a replica twice: {', '.join(names)}")
    both = sorted(set(record.iss) & set(record.elr))
    if both:
        problems.append(f"{', '.join(both)}: both in iss and in elr")
    if not record.iss and not record.elr:
        problems.append("neither iss nor elr has a replica: nobody could ever be elected")
    if record.master and record.master not in record.replicas:
        problems.append(f"master = {record.master}, of which there is no replica")
    if record.master and not record.epoch:
        problems.append(f"master = {record.master} in epoch 0, before any election")
    return problems


def new_record(
    group: str, replicas: Sequence[tuple[str, str]], *, min_iss: int = 2, first: str | None = None
) -> GroupRecord:
    """The record of a new group. Raises ConfigError with all that is impossible about it.

    Args:
        first: whose store the group begins with; the others join it, and have to be empty. Default:
            the first one that is named.
    """
    problems = impossible(replicas, min_iss)
    first = first or (replicas[0][0] if replicas else "")
    if first not in dict(replicas):
        problems.append(f"first = {first!r}, which is none of the replicas")
    if problems:
        raise ConfigError(*problems)
    members = {name: Member(address) for name, address in replicas}
    record = GroupRecord(group=group, replicas=members, iss=(first,), min_iss=min_iss)
    return _possible(record)  # the group's name as well


# --- edits ----------------------------------------------------------------------------------------


def registered(record: GroupRecord, replica: str, member: Member, *, stays: bool) -> GroupRecord:
    """A replica has started. If it was the master, nobody is: a restart costs an epoch.

    Args:
        stays: False: its log may lack what is confirmed, so it leaves `iss` and `elr`.
    """
    return msgspec.structs.replace(
        record,
        replicas={**record.replicas, replica: member},
        master="" if record.master == replica else record.master,
        iss=record.iss if stays else _without(record.iss, replica),
        elr=record.elr if stays else _without(record.elr, replica),
    )


def elected(record: GroupRecord, replica: str, alive: Collection[str]) -> GroupRecord:
    """A new epoch. Those of the in-sync set that are not alive are left out of it at once."""
    iss = [each for each in record.iss if each == replica or each in alive]
    # One of `elr` is alone: the whole in-sync set is away, or it would not have been elected.
    iss = iss if replica in iss else [replica]
    return _with_set(record, iss, epoch=record.epoch + 1, master=replica)


def changed(record: GroupRecord, join: Collection[str], leave: Collection[str]) -> GroupRecord:
    """The master's change of the in-sync set."""
    return _with_set(record, (set(record.iss) | set(join)) - set(leave))


def resigned(record: GroupRecord) -> GroupRecord:
    """The master gives up its mastership, and its place in the in-sync set: it can be reached by
    nobody, so the others need not wait for its word."""
    left = _without(record.iss, record.master)
    return _with_set(record, left, master="")


def added(record: GroupRecord, replica: str, address: str) -> GroupRecord:
    """An operator's: one more replica, which joins the set once it has everything. Its store has to
    be empty: one with messages is not taken in. Raises ConfigError."""
    if replica in record.replicas:
        known = record.replicas[replica].address
        raise ConfigError(f"{replica} is a replica of {record.group} already, at {known}")
    if not is_peer(replica, address):
        raise ConfigError(
            f"{replica:.140} at {address:.280}: must be an id of letters, digits, _ and . at a "
            "host:port, as dLegerPeers has it"
        )
    replicas = {**record.replicas, replica: Member(address)}
    return _possible(msgspec.structs.replace(record, replicas=replicas))


def removed(record: GroupRecord, replica: str) -> GroupRecord:
    """An operator's: one replica less. Raises ConfigError where the others would be too few, or may
    lack what it has."""
    problems = []
    if replica not in record.replicas:
        raise ConfigError(f"{record.group} has no replica {replica}")
    if replica == record.master:
        problems.append(f"{replica} is the master: name another one first (failover)")
    if replica in record.iss and len(record.iss) <= record.min_iss:
        problems.append(
            f"{replica} is one of {len(record.iss)} replicas in sync, of which the group needs "
            f"{record.min_iss}: wait until another one has joined"
        )
    if replica in record.elr:
        problems.append(
            f"{replica} has all that is confirmed, and too few are in sync: wait until they are"
        )
    left = {name: member for name, member in record.replicas.items() if name != replica}
    members = [(name, member.address) for name, member in left.items()]
    problems += [f"without {replica}: {each}" for each in impossible(members, record.min_iss)]
    if problems:
        raise ConfigError(*problems)
    smaller = msgspec.structs.replace(record, replicas=left, iss=_without(record.iss, replica))
    return _possible(smaller)


def _possible(record: GroupRecord) -> GroupRecord:
    """It, as it is read again. Raises ConfigError."""
    return decode_record(encode_record(record))


def _with_set(
    record: GroupRecord, iss: Collection[str], epoch: int | None = None, master: str | None = None
) -> GroupRecord:
    """Who leaves has all that is confirmed, and while the set is too small nothing more will be."""
    short = len(iss) < record.min_iss
    eligible = (set(record.iss) | set(record.elr)) - set(iss) if short else set()
    return msgspec.structs.replace(
        record,
        epoch=record.epoch if epoch is None else epoch,
        master=record.master if master is None else master,
        iss=tuple(sorted(iss)),
        elr=tuple(sorted(eligible)),
    )


def _without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(each for each in names if each != name)
