"""A writer in this process, with allocator and flush process beside it, as in a broker."""

from cometmq.bench.embedded import Embedded

__all__ = ["Embedded"]
