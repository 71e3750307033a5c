"""Commands on groups: to create, change and delete them."""

from __future__ import annotations

import logging

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.files import now_ms
from cometmq.actors.coordination.members import Members
from cometmq.actors.coordination.poppers import Poppers
from cometmq.actors.coordination.topics import Topics
from cometmq.actors.runtime.request import Request
from cometmq.actors.tables.group_settings import changed, check_consuming, settings_of
from cometmq.protocol import names
from cometmq.protocol.commands import ChangeMode, DeleteGroup, PutGroup
from cometmq.protocol.configs import SubscriptionGroupConfig
from cometmq.protocol.errors import BadRequest, GroupExists, GroupInUse, GroupNotExist, NoPermission
from cometmq.protocol.ledger import GroupPut, GroupRemoved

log = logging.getLogger(__name__)


class Groups:
    """Changes what subscriptionGroup.json has of a group, and forgets groups."""

    def __init__(self, books: Books, members: Members, poppers: Poppers, topics: Topics) -> None:
        self._books = books
        self._configs = books.groups.configs
        self._members = members
        self._poppers = poppers
        self._topics = topics

    def on_put_group(self, command: PutGroup, request: Request) -> None:
        name = command.group
        names.check_group(name)
        there = self._configs.get(name)
        if command.mode == ChangeMode.CREATE:
            config = changed(SubscriptionGroupConfig(group_name=name), command.settings)
            if there is not None and settings_of(there) != settings_of(config):
                raise GroupExists(
                    f"group {name} exists: {_difference(there, config)}; nothing was changed "
                    "(to change it: group update)"
                )
            config = there or config
        elif command.mode == ChangeMode.UPDATE:
            if there is None and not self._is_known(name):
                raise GroupNotExist(f"group {name} is unknown to this broker")
            config = changed(there or SubscriptionGroupConfig(group_name=name), command.settings)
        else:
            raise BadRequest(f"mode {command.mode}: 0 create, 1 update")
        if config != there:
            self._check_way(there, config)
            self._put(config)
        self._books.then(request.conclude)

    def on_delete_group(self, command: DeleteGroup, request: Request) -> None:
        name = command.group
        names.refuse_internal_group(name)
        if not self._is_known(name):
            names.check_group(name)
            raise GroupNotExist(f"group {name} is unknown to this broker")
        check_unused(self._poppers, name, by_force=command.force)
        retry_topics = self._books.retry_topics.of_group(name)
        self._members.evict(name)
        self._books.change(GroupRemoved(name))
        log.info("group %s is deleted", name)
        if retry_topics and not command.keep_retry_topic:
            self._topics.delete(request, *retry_topics)
        else:
            self._books.then(request.conclude)

    def _check_way(
        self, there: SubscriptionGroupConfig | None, wanted: SubscriptionGroupConfig
    ) -> None:
        """What is out in one way is not seen by who takes messages in the other."""
        before = there or SubscriptionGroupConfig(group_name=wanted.group_name)
        if before.consume_message_orderly == wanted.consume_message_orderly:
            return
        if self._books.has_popped(wanted.group_name, now_ms()):
            raise GroupInUse(
                f"group {wanted.group_name} has messages out: consumeMessageOrderly is changed "
                "once they are acknowledged, or their time is over"
            )
        self._books.forget_pops(wanted.group_name)

    def _is_known(self, name: str) -> bool:
        """A group may have members or offsets only: a file of an older store may lack it."""
        return name in self._members.known() or bool(self._books.offsets.topics_of(name))

    def _put(self, config: SubscriptionGroupConfig) -> None:
        name = config.group_name
        self._books.check_new_group(name)
        done = "changed" if name in self._configs else "created"
        self._books.change(GroupPut(config))
        log.info("group %s is %s", name, done)
        try:
            check_consuming(config)
        except NoPermission as error:
            self._members.refuse(name, error)


def check_unused(poppers: Poppers, group: str, *, by_force: bool) -> None:
    """Raise GroupInUse if the group has members, of either kind, unless by force."""
    active = poppers.members_of(group)
    if active and not by_force:
        more = f" and {len(active) - 1} more" if len(active) > 1 else ""
        raise GroupInUse(
            f"group {group} has members: {active[0]}{more}; nothing was changed: end them, or "
            "force it"
        )


def _difference(there: SubscriptionGroupConfig, wanted: SubscriptionGroupConfig) -> str:
    """In words, for who asked for another group than there is."""
    asked = settings_of(wanted)
    return ", ".join(
        f"{key} {value}, not {asked[key]}"
        for key, value in settings_of(there).items()
        if value != asked[key]
    )
