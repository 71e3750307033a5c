"""The program: `cometmq`, or `python -m cometmq`."""

from __future__ import annotations

import sys

from cometmq.cli.interrupts import end_on_ctrl_c, ending_on_ctrl_c


def main() -> None:
    with ending_on_ctrl_c():
        from cometmq.cli.command_line import run
    code = run()
    end_on_ctrl_c()  # what is left to be done has nobody who would catch it
    sys.exit(code)


if __name__ == "__main__":
    main()
