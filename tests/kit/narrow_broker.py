"""A broker that may have little: 1,024 descriptors and no way to more, or few segments mapped, for
test_many_queues."""

from __future__ import annotations

import os
import resource

from cometmq.actors.launch import embedded
from cometmq.shm.os import files

DESCRIPTORS = 1_024


def main() -> None:
    if "MAPS_MAX" in os.environ:
        files.FILE_MAPS_MAX = int(os.environ["MAPS_MAX"])  # type: ignore[misc]
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    embedded.main()


if __name__ == "__main__":
    main()
