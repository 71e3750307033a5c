"""A consumer with 1,024 descriptors and no way to more, for test_many_queues.

    python narrow_consumer.py NAME_SERVER TRANSPORT COUNT TOPIC...

It prints one JSON line: how many messages came, of how many queues, the descriptors that it
had open in the end, and the segments that it had mapped.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

from patience import patient

DESCRIPTORS = 1_024
WAIT_S = patient(300)


def consume(name_server: str, transport: str, count: str, *topics: str) -> None:
    from cometmq import Consumer
    from cometmq.shm.kernel.codec import file_maps

    came = 0
    queues = set()
    began = time.monotonic()
    group = f"g-{transport}"
    with Consumer(name_server, group, topics[0], transport=transport, start="earliest") as consumer:
        for topic in topics[1:]:
            consumer.subscribe(topic)
        while came < int(count) and time.monotonic() < began + WAIT_S:
            messages = consumer.poll(10_000, 1)
            consumer.ack(messages)
            came += len(messages)
            queues.update((message.topic, message.queue_id) for message in messages)
        found = {
            "came": came,
            "queues": len(queues),
            "seconds": time.monotonic() - began,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "maps": file_maps(),
        }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    consume(*sys.argv[1:])
