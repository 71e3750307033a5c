"""Other brokers to be measured beside CometMQ: a module each, loaded when its name is asked for.

A module has a function `system()` that makes its `cometmq.bench.systems.System`. Which settings are
its page cache and its fdatasync, and what its clients are set to, stands at the top of it.

    python -m cometmq.bench.peers fetch            # get what is missing, and say what cannot be had
    python -m cometmq.bench.peers fetch kafka nats
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cometmq.bench.extra import BenchError
from cometmq.bench.systems import PEERS, system


def fetch(
    names: Iterable[str] = PEERS, say: Callable[[str], None] = lambda text: None
) -> dict[str, str | None]:
    """Get what each of these peers lacks: jars from Maven Central, servers from Debian.

    Args:
        say: is told what is being done, a line at a time.

    Returns: by name, None when it can be measured now; else the sentence that says why not.
    """
    return {name: _fetch(name, say) for name in names}


def _fetch(name: str, say: Callable[[str], None]) -> str | None:
    say(f"{name} ...")
    try:
        peer = system(name)
        peer.fetch()  # type: ignore[attr-defined]  # all of ours have it
        missing = peer.missing()
    except BenchError as error:
        missing = str(error)
    say(f"{name}: {missing or peer.version()}")
    return missing
