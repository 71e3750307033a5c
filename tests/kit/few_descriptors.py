"""A client with as many descriptors as it takes, and with any number below, for test_descriptors.

    python few_descriptors.py CLIENT NAME_SERVER

It allows itself one more at a time, until the client works, and prints one JSON line: the limits
that were too low, and the text of the last error. What else is raised ends it.
"""

from __future__ import annotations

import json
import os
import resource
import sys

from patience import patient

from cometmq import Admin, Consumer, Producer
from cometmq.errors import TooFewDescriptors

MORE = 100


def use(client: str, name_server: str) -> None:
    if client == "admin":
        with Admin(name_server) as admin:
            assert admin.topics()
    elif client == "producer":
        with Producer(name_server) as producer:
            producer.send("t", b"x")
    else:
        with Consumer(name_server, "g", "t", start="earliest") as consumer:
            assert consumer.poll(1, patient(20))


def allow(count: int) -> None:
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (count, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


if __name__ == "__main__":
    too_low, text = [], ""
    beginning = len(os.listdir("/proc/self/fd"))
    for count in range(beginning, beginning + MORE):
        allow(count)
        try:
            use(*sys.argv[1:])
        except TooFewDescriptors as error:
            too_low.append(count)
            text = str(error)
        else:
            print(json.dumps({"too_low": too_low, "text": text, "enough": count}))
            break
