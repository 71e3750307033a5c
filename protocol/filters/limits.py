"""Limits of a filter: what an expression may cost those who parse it and those who evaluate it."""

from __future__ import annotations

from typing import Final

TEXT_MAX: Final = 8_192  # bytes of the expression
OPERATORS_MAX: Final = 1_024  # comparisons, AND, OR, NOT, signs
NAMES_MAX: Final = 128  # different properties
DEPTH_MAX: Final = 64  # values at once on the stack of the evaluation
