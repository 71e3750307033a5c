"""JVMs of tests live for seconds: what an hour of running would repay costs them most. No tests
here."""

from __future__ import annotations

from typing import Final

#: Without the second compiler, which takes as much as all that they do, and without verifying the
#: classes of published jars.
QUICK: Final = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-BytecodeVerificationRemote",
)
#: And of a small heap.
SMALL: Final = ("-XX:+UseSerialGC", *QUICK)
