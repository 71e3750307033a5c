"""Replication in `cometmq stat`: a master's slaves, and a slave's master."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from cometmq.actors.runtime import meters

# Of a slave's commitlog process.
FOLLOWING: Final = tuple(
    meter.name
    for meter in (
        meters.MASTER,
        meters.MASTER_STATE,
        meters.MASTER_TROUBLE,
        meters.ACKNOWLEDGED,
        meters.LAST_HEARD_S,
        meters.BEHIND_MS,
    )
)


def slaves_in(values: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Figures of each slave, and the other figures of the `ha` process."""
    rest = {
        key: value
        for key, value in values.items()
        if key != meters.PID.key and all(meter.label_in(key) is None for meter in meters.OF_SLAVE)
    }
    return list(meters.by_label(values, *meters.OF_SLAVE).values()), rest


def slaves_text(slaves: list[dict[str, Any]]) -> str:
    """Each of them, and how far it is."""
    return (
        "; ".join(
            f"{slave['address']} at {slave['acknowledged']:,}, {slave['lag_bytes']:,} bytes behind "
            f"since {datetime.fromtimestamp(slave['since_ms'] / 1000):%Y-%m-%d %H:%M:%S}"
            for slave in slaves
        )
        or "none is connected"
    )


def following_lines(following: dict[str, Any], end: int) -> dict[str, str]:
    """Of a slave: whom it follows, how far it is, and what keeps it."""
    if not following:
        return {}
    text = f"{following['master']}: {following['master_state']} at {end:,}"
    if following["master_trouble"]:
        text += f" ({following['master_trouble']})"
    if "last_heard_s" in following:
        text += f", last heard {following['last_heard_s']:.1f} s ago"
    if following.get("behind_ms"):
        text += f", its last message is {following['behind_ms'] / 1000:,.1f} s old"
    return {"master": text}
