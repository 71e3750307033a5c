"""Replication in `cometmq stat`: a master's slaves, and a slave's master."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from typing import Any, Final

# Of a slave's commitlog process.
FOLLOWING: Final = (
    "master", "master_state", "master_trouble", "acknowledged", "last_heard_s", "behind_ms",
)  # fmt: skip
# What a counter says about work in hand rather than about how far it has come.


def slaves_in(values: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What the `ha` process counts: each slave, and the rest."""
    slaves: dict[str, dict[str, Any]] = defaultdict(dict)
    rest = {}
    for key, value in values.items():
        head, dot, name = key.partition(".")
        number, _, name = name.partition(".")
        if dot and head == "slave":
            slaves[number][name] = value
        elif key != "pid":
            rest[key] = value
    return list(slaves.values()), rest


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
