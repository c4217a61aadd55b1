"""Numbers for JSON."""

from __future__ import annotations

import math


def plain(value: float | None) -> float | str | None:
    """The number; NaN and infinities, which JSON lacks, as text.

    >>> plain(1.5), plain(float("nan")), plain(float("-inf"))
    (1.5, 'nan', '-inf')
    """
    return value if value is None or math.isfinite(value) else str(value)


def or_none(value: float | None) -> float | None:
    """The number, or None if it is not finite: a gap in a chart.

    >>> or_none(float("nan")) is None
    True
    """
    return value if value is not None and math.isfinite(value) else None
