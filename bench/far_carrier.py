"""Carries the frames of far_network.py: `python far_carrier.py DELAY_S TAPS`.

TAPS is JSON: the address of each TAP device, and its descriptor, which is inherited.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

from cometmq.shm.os.libc import set_timer_slack

FRAME_BYTES: Final = 65_536
MAC_BYTES: Final = 6


def carry(taps: Mapping[bytes, int], delay_s: float) -> None:
    """Until it is killed. All frames take equally long, so they arrive in the order in which they
    left."""
    set_timer_slack(1)
    under_way: deque[tuple[float, int, bytes]] = deque()  # when it arrives; whose; what
    while True:
        left_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([*taps.values()], (), (), left_s)
        arrives = time.monotonic() + delay_s
        under_way += [(arrives, tap, os.read(tap, FRAME_BYTES)) for tap in readable]
        while under_way and under_way[0][0] <= time.monotonic():
            _, sender, frame = under_way.popleft()
            receiver = taps.get(frame[:MAC_BYTES])
            for tap in taps.values() if receiver is None else (receiver,):
                if tap != sender:
                    with contextlib.suppress(OSError):  # it is full, or down: the frame is lost
                        os.write(tap, frame)


if __name__ == "__main__":
    told = json.loads(sys.argv[2])
    addresses = {bytes.fromhex(mac.replace(":", "")): tap for mac, tap in told.items()}
    carry(addresses, float(sys.argv[1]))
