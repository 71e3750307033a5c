"""Where the tests lie, and the search path that their own processes need to import them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

KIT: Final = Path(__file__).resolve().parent
TESTS: Final = KIT.parent
ROOT: Final = TESTS.parent

#: For PYTHONPATH: the helpers by their names, and the packages `fault` and `interop`.
SEARCH: Final = os.pathsep.join([str(TESTS), str(KIT)])
