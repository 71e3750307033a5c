"""The program of docs/transactions.md, which dies at every line: of its own, and of the client's.

    python ordering.py PAGE NAME_SERVER DATABASE [LINES_MAX]

Prints one line of JSON: how many processes died, and how many orders came through.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import dying

PROGRAM = "program of docs/transactions.md"
SEED = 20_261_123


def program(page: Path, name_server: str, database: str) -> dict[str, Any]:
    """Its names, as if it had been imported."""
    found = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert found is not None
    text = found[1].replace("tcp://127.0.0.1:9876", name_server).replace("shop.db", database)
    names: dict[str, Any] = {"__name__": "shop"}
    exec(compile(text, PROGRAM, "exec"), names)
    return names


def watched() -> frozenset[str]:
    from cometmq.client.sending import ends, transaction

    return frozenset({PROGRAM, str(ends.__file__), str(transaction.__file__)})


def main() -> None:
    page, name_server, database, most = sys.argv[1:5]
    shop = program(Path(page), name_server, database)
    shop["prepare"]()

    def order(number: int) -> None:
        from cometmq import Producer

        with Producer(name_server, name="shop") as producer:  # who checks is another process
            shop["order"](producer, number, f"order {number}")

    read_end, write_end = os.pipe()

    def tell_lines() -> None:
        passed = dying.lines_of(lambda: order(0), watched())
        with os.fdopen(write_end, "w") as pipe:
            json.dump([(*line, count) for line, count in passed.items()], pipe)

    dying.in_child(tell_lines)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        lines = json.load(pipe)
    random.Random(SEED).shuffle(lines)
    died = 0
    for number, (file, line, count) in enumerate(lines[: int(most)], 1):
        nth = 1 + number % count

        def die(number: int = number, file: str = file, line: int = line, nth: int = nth) -> None:
            with dying.traced(dying.dying_at((file, line), nth), watched()):
                order(number)

        died += dying.in_child(die) == dying.DIED
    print(json.dumps({"died": died, "orders": 1 + len(lines[: int(most)])}), flush=True)


if __name__ == "__main__":
    main()
