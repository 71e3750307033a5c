"""`cometmq.actors.launch.embedded` as a replica of a group that faults are tried on.

By its environment it lives in a network namespace, and believes in a boot of the machine that ends
where its disk's power is cut.
"""

from __future__ import annotations

import os
from typing import Final

from fault.network import enter

from cometmq.actors.launch import embedded
from cometmq.actors.replication.group import member

MODULE: Final = "fault.replica"
NAMESPACE: Final = "COMETMQ_TEST_NAMESPACE"
BOOT: Final = "COMETMQ_TEST_BOOT"


def main() -> None:
    """Before the zygote is forked, so every child has it."""
    if path := os.environ.get(NAMESPACE):
        enter(path)
    boot = os.environ[BOOT]
    member.boot_id = lambda: boot  # the mount, which LastRun looks at, is another one anyway
    embedded.main()


if __name__ == "__main__":
    main()
