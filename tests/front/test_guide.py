"""The guide's programs, run as they stand, in the order of each page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient

from cometmq import Broker

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
PAGES = [*sorted(page.name for page in GUIDE.glob("*.md")), "../consuming.md", "../testing.md"]
SERVER = "127.0.0.1:9876"
WAIT_S = patient(90)


def programs_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (GUIDE / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if programs_of(page)])
def test_the_programs_of_a_page(page: str, tmp_path: Path) -> None:
    with Broker(tmp_path / "store", profile="test") as broker:
        server = broker.name_server.removeprefix("tcp://")
        for program in programs_of(page):
            run = subprocess.run(
                [sys.executable, "-c", program.replace(SERVER, server)],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=WAIT_S,
            )
            assert run.returncode == 0, (program, run.stderr)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)", (GUIDE / page).read_text()):
            assert ((GUIDE / page).parent / link).exists(), (page, link)


def test_every_error_of_the_page_is_there() -> None:
    import cometmq

    for name in re.findall(r"`([A-Z][a-z]\w+)`", (GUIDE / "errors.md").read_text()):
        assert hasattr(cometmq.errors, name) or hasattr(cometmq, name), name
