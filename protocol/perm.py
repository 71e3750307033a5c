"""What may be done with a topic: bits. RocketMQ PermName."""

from typing import Final

INHERIT: Final = 1  # a topic that is made after this one gets its settings
WRITE: Final = 2
READ: Final = 4
PRIORITY: Final = 8  # of RocketMQ's past; it is kept as it was found

READ_WRITE: Final = READ | WRITE
CLIENTS_MAX: Final = READ | WRITE | INHERIT  # the highest that a client may give a topic
PERM_MAX: Final = CLIENTS_MAX | PRIORITY
