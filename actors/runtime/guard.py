"""What an actor does with an exception: the one place that decides it.

    try:
        ...
    except Exception as error:
        request.fail(explained(error, "%s failed in %s", what, role))

A CometError is an answer. Anything else that a command, a timer or a doorbell raises is an error of
ours: logged with its traceback, answered as such, and outlived. But an AssertionError is a broken
invariant, after which nothing that the actor knows can be relied on: it goes on upward and ends the
process. So nothing that comes from outside may be asserted: it is checked, and refused.
"""

from __future__ import annotations

import logging

from cometmq.protocol.errors import CometError

log = logging.getLogger(__name__)


class Unforeseen(CometError):
    """An exception of another kind; it has been logged."""


def explained(error: Exception, text: str, *arguments: object) -> CometError:
    """The error to be answered. To be called where the exception was caught; it goes on from there
    if it is an AssertionError.

    Args:
        text, arguments: for the log, with the traceback, if nobody foresaw it.
    """
    if isinstance(error, AssertionError):
        raise error
    if isinstance(error, CometError):
        return error
    log.error(text, *arguments, exc_info=error)
    return Unforeseen(f"{type(error).__name__}: {error}")
