"""Cutting a sequence of layers into stages."""

from __future__ import annotations

from collections.abc import Sequence


def uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of parts with equally many items; the first ones get one more if needed.

    >>> uniform(5, 2)
    [0, 3, 5]
    """
    size, rest = divmod(num_items, num_parts)
    bounds = [0]
    for part in range(num_parts):
        bounds.append(bounds[-1] + size + (part < rest))
    return bounds


def balanced(weights: Sequence[int], num_parts: int) -> list[int]:
    """Bounds of parts whose weights differ least; each part has an item if there are enough.

    >>> balanced([4, 1, 1, 4], 2)
    [0, 2, 4]
    """
    items = len(weights)
    if items <= num_parts:
        return uniform(items, num_parts)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # For each number of parts and end: the largest and the smallest weight of the best cut so far, and its last bound.
    best: list[dict[int, tuple[int, int, int]]] = [{end: (sums[end], sums[end], 0) for end in range(1, items + 1)}]
    for count in range(1, num_parts):
        row = {}
        for end in range(count + 1, items + 1):
            options = []
            for start in range(count, end):
                largest, smallest, _ = best[-1][start]
                weight = sums[end] - sums[start]
                options.append((max(largest, weight), min(smallest, weight), start))
            row[end] = min(options, key=lambda option: (option[0] - option[1], -option[2]))
        best.append(row)
    bounds = [items]
    for row in reversed(best):
        bounds.append(row[bounds[-1]][2])
    return bounds[::-1]
