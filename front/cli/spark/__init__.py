"""`cometmq spark`: jobs over stores, archives and running brokers.

Nothing of Spark is imported before a command runs.
"""

from __future__ import annotations

from typing import Final

import click

from cometmq.cli.options import LazyGroup

_HERE: Final = "cometmq.cli.spark"


@click.group(
    cls=LazyGroup,
    entries={
        "audit": (f"{_HERE}.audit", "audit", "Compare log and queues of a store, both ways."),
        "archive": (
            f"{_HERE}.archives",
            "archive",
            "Bring sealed segments of a store to Parquet, each once.",
        ),
        "replay": (f"{_HERE}.archives", "replay", "From an archive back to a store or a topic."),
        "stats": (f"{_HERE}.traffic", "stats", "Count messages by topic and hour; with a plot."),
        "lag": (
            f"{_HERE}.traffic",
            "lag",
            "What consumer groups are behind: messages, bytes, time.",
        ),
        "dlq": (f"{_HERE}.letters", "dlq", "Count the dead letters of groups, and export them."),
        "ingest": (
            f"{_HERE}.tables",
            "ingest",
            "Bring a topic into a Parquet table, each message once.",
        ),
        "compact": (
            f"{_HERE}.tables",
            "compact",
            "Write the newest message of each key as a table.",
        ),
        "doctor": (
            f"{_HERE}.doctor",
            "doctor",
            "Look for what Spark needs, and send one row to a broker and back.",
        ),
    },
    epilog="\b\nExit codes: 0 done, 1 findings, 2 wrong usage, 3 failed, 130 interrupted (Ctrl-C).",
)
def spark() -> None:
    """Jobs over stores, archives and running brokers.

    They need the extra `spark` (pip install '.[spark]') and Java 17; `lag` needs no Java.
    """
