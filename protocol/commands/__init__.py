"""Every command and answer on ZeroMQ, declared once.

A command is a MessagePack array whose first element is its tag. Fields are only ever added, at the
end, with a default: an older sender gets the default, an older receiver ignores the rest. What a
command carries in bulk (batches, records) travels in frames of its own behind it.

Names in `-> X` say which answer comes back; every command may be answered by `Failed` instead.
A process refuses at its door what the sender may not say, what it does not take, and a number that
does not fit its field.
"""

from __future__ import annotations

from typing import Final

from cometmq.protocol.commands.administration import *
from cometmq.protocol.commands.consuming import *
from cometmq.protocol.commands.general import *
from cometmq.protocol.commands.group_administration import *
from cometmq.protocol.commands.groups import *
from cometmq.protocol.commands.inner import *
from cometmq.protocol.commands.popping import *
from cometmq.protocol.commands.reading import *
from cometmq.protocol.commands.replies import *
from cometmq.protocol.commands.root import *
from cometmq.protocol.commands.sending import *
from cometmq.protocol.commands.topics import *
from cometmq.protocol.commands.transactions import *

PROTOCOL_VERSION: Final = 1


def _all(root: type[Command]) -> list[type[Command]]:
    return [child for kind in root.__subclasses__() for child in (kind, *_all(kind))]


COMMANDS: Final = tuple(sorted((kind for kind in _all(Command) if kind is not Answer), key=tag_of))
BY_TAG: Final = {tag_of(kind): kind for kind in COMMANDS}
