"""The box: a rectangular piece of a global tensor, given by offsets and lengths.

A shard on a rank, a chunk in a checkpoint, a slice to be read, a piece of a flattened parameter (through `flat_ranges`
and `boxes_of_flat_range`) are all boxes, and redistribution, resharding and planning are intersections of boxes.

A box is a set of elements, and a box without elements is a legal one: it intersects nothing, and every box contains it.
A 0-d tensor is the box with no dims, and has one element.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, product
from math import prod
from typing import NamedTuple, Self

from terrazzo.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor from `offsets` (inclusive), `lengths` long in each dim.

    >>> Box((0, 2), (4, 2)).intersect(Box((3, 0), (5, 3)))
    Box(offsets=(3, 2), lengths=(1, 1))
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.lengths):
            raise LayoutError(f"a box needs one length per offset: offsets {self.offsets}, lengths {self.lengths}")
        if self.lengths and (min(self.lengths) < 0 or min(self.offsets) < 0):
            raise LayoutError(f"a box cannot be negative: offsets {self.offsets}, lengths {self.lengths}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """All of a tensor of this shape.

        >>> Box.whole((4, 6))
        Box(offsets=(0, 0), lengths=(4, 6))
        """
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        return len(self.offsets)

    @property
    def numel(self) -> int:
        return prod(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        """Where the box stops in each dim (exclusive)."""
        return tuple([offset + length for offset, length in zip(self.offsets, self.lengths, strict=True)])

    @property
    def is_empty(self) -> bool:
        return 0 in self.lengths

    def intersect(self, other: "Box") -> "Box | None":
        """The elements in both, or None if there are none."""
        self._check_same_ndim(other)
        offsets = []
        lengths = []
        for a, a_length, b, b_length in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True):
            start = max(a, b)
            length = min(a + a_length, b + b_length) - start
            if length <= 0:
                return None
            offsets.append(start)
            lengths.append(length)
        return Box(tuple(offsets), tuple(lengths))

    def subtract(self, other: "Box") -> "tuple[Box, ...]":
        """The elements of this box that are not in `other`, as disjoint boxes: at most two per dim.

        >>> Box.whole((4, 4)).subtract(Box((1, 0), (3, 2)))
        (Box(offsets=(0, 0), lengths=(1, 4)), Box(offsets=(1, 2), lengths=(3, 2)))
        """
        if self.is_empty:
            return ()
        common = self.intersect(other)
        if common is None:
            return (self,)
        # Cut slabs off one dim at a time; after each dim, the rest agrees with `common` in the dims so far.
        rest = []
        offsets, lengths = list(self.offsets), list(self.lengths)
        for dim, (start, length) in enumerate(zip(common.offsets, common.lengths, strict=True)):
            end = start + length
            for slab_start, slab_end in ((offsets[dim], start), (end, offsets[dim] + lengths[dim])):
                if slab_start < slab_end:
                    rest.append(
                        Box(
                            (*offsets[:dim], slab_start, *offsets[dim + 1 :]),
                            (*lengths[:dim], slab_end - slab_start, *lengths[dim + 1 :]),
                        )
                    )
            offsets[dim], lengths[dim] = start, length
        return tuple(rest)

    def contains(self, other: "Box") -> bool:
        """Whether every element of `other` is in this box."""
        self._check_same_ndim(other)
        return other.is_empty or self._encloses(other)

    def relative_to(self, outer: "Box") -> "Box":
        """This box in the coordinates of a tensor that holds just `outer`, which must enclose it.

        >>> Box((5, 2), (1, 2)).relative_to(Box((4, 0), (4, 8)))
        Box(offsets=(1, 2), lengths=(1, 2))
        """
        self._check_same_ndim(outer)
        if not outer._encloses(self):
            raise LayoutError(f"{self} does not lie inside {outer}")
        return Box(tuple([a - b for a, b in zip(self.offsets, outer.offsets, strict=True)]), self.lengths)

    def shifted(self, offsets: Sequence[int]) -> "Box":
        """This box moved by `offsets`; moving by `outer.offsets` undoes `relative_to(outer)`."""
        if len(offsets) != len(self.offsets):
            raise LayoutError(f"{self} cannot be shifted by {tuple(offsets)}: another number of dims")
        return Box(tuple([a + b for a, b in zip(self.offsets, offsets, strict=True)]), self.lengths)

    def slices(self) -> tuple[slice, ...]:
        """The index that picks these elements: `tensor[box.slices()]`."""
        return tuple([slice(o, o + length) for o, length in zip(self.offsets, self.lengths, strict=True)])

    def split(self, dim: int, sizes: Sequence[int]) -> "tuple[Box, ...]":
        """Adjacent boxes along `dim`, of the given sizes (some may be 0), that together make up this one."""
        if not 0 <= dim < len(self.lengths):
            raise LayoutError(f"{self} has no dim {dim} to split")
        if sum(sizes) != self.lengths[dim]:
            raise LayoutError(f"{self} cannot be split along dim {dim} into {tuple(sizes)}: sizes must add up")
        starts = accumulate(sizes, initial=self.offsets[dim])
        return tuple(
            Box(
                (*self.offsets[:dim], start, *self.offsets[dim + 1 :]),
                (*self.lengths[:dim], size, *self.lengths[dim + 1 :]),
            )
            for start, size in zip(starts, sizes, strict=False)
        )

    def flat_ranges(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The longest runs (start, stop) of these elements in the row-major flattened tensor of `shape`, in order.

        >>> Box((1, 0), (2, 4)).flat_ranges((4, 4)), Box((1, 1), (2, 2)).flat_ranges((4, 4))
        (((4, 12),), ((5, 7), (9, 11)))
        """
        if not Box.whole(shape)._encloses(self):
            raise LayoutError(f"{self} does not lie inside a tensor of shape {tuple(shape)}")
        if self.is_empty:
            return ()
        # A run spans all trailing dims that the box covers whole, and the box's length in the dim before these.
        run_dim = len(shape) - 1
        while run_dim > 0 and self.lengths[run_dim] == shape[run_dim]:
            run_dim -= 1
        if run_dim < 0:
            return ((0, 1),)
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        run = self.lengths[run_dim] * strides[run_dim]
        first = sum([offset * stride for offset, stride in zip(self.offsets, strides, strict=True)])
        steps = [range(0, n * stride, stride) for n, stride in zip(self.lengths[:run_dim], strides, strict=False)]
        starts = [first + sum(step) for step in product(*steps)]
        return tuple([(start, start + run) for start in starts])

    def _encloses(self, other: "Box") -> bool:
        return len(self.offsets) == len(other.offsets) and all(
            a <= b and b + b_length <= a + a_length
            for a, a_length, b, b_length in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True)
        )

    def _check_same_ndim(self, other: "Box") -> None:
        if len(self.offsets) != len(other.offsets):
            raise LayoutError(f"{self} and {other} are boxes in tensors with different numbers of dims")


def make_up(whole: Box, boxes: Iterable[Box]) -> bool:
    """Whether each element of `whole` is in exactly one of the boxes, and these have no other elements.

    The number of boxes that an element is in is a step function; differentiated in each dim, it is a number at each
    corner of a box. The boxes make up `whole` exactly if these numbers are its own. Corners in which boxes meet cancel
    dim by dim, so the time grows with the number of boxes and not with its square. Boxes whose corners do not cancel in
    more than 6 dims could have any number of corners: of these the answer is False.

    >>> make_up(Box((0,), (4,)), [Box((0,), (2,)), Box((2,), (2,))])
    True
    >>> make_up(Box((0,), (4,)), [Box((0,), (2,)), Box((0,), (2,))])
    False
    """
    counts: dict[tuple[int, ...], int] = defaultdict(int)  # by offset and end in each dim
    for box in boxes:
        if not box.is_empty:
            counts[tuple(chain.from_iterable(zip(box.offsets, box.ends, strict=True)))] += 1
    if not whole.is_empty:
        counts[tuple(chain.from_iterable(zip(whole.offsets, whole.ends, strict=True)))] -= 1
    most = len(counts) << 6
    for dim in range(whole.ndim):
        corners: dict[tuple[int, ...], int] = defaultdict(int)  # in the dims so far; the rest as before
        for spans, count in counts.items():
            if count:
                before, (start, end), after = spans[:dim], spans[dim : dim + 2], spans[dim + 2 :]
                corners[(*before, start, *after)] += count
                corners[(*before, end, *after)] -= count
        if len(corners) > most:
            return False
        counts = corners
    return not any(counts.values())


class Link(NamedTuple):
    """A box of a model's tensor that is a box of a tensor of a file, or of a published one.

    One of them may have one more dim, of length 1.
    """

    model: str
    model_box: Box
    file: str
    file_box: Box

    def in_file(self, box: Box) -> Box:
        """A box of the model's tensor, inside of `model_box`, as a box of the file's."""
        part = box.relative_to(self.model_box)
        offsets, lengths = part.offsets, part.lengths
        if len(offsets) > len(self.file_box.offsets):
            offsets, lengths = offsets[1:], lengths[1:]
        elif len(offsets) < len(self.file_box.offsets):
            offsets, lengths = (0, *offsets), (1, *lengths)
        return Box(offsets, lengths).shifted(self.file_box.offsets)


def row_major_windows(shape: Sequence[int], limit: int) -> list[Box]:
    """Boxes of at most `limit` elements that, one after the other, are the row-major elements of `shape`.

    >>> row_major_windows((2, 3), 2)
    [Box(offsets=(0, 0), lengths=(1, 2)), Box(offsets=(0, 2), lengths=(1, 1)), Box(offsets=(1, 0), lengths=(1, 2)), \
Box(offsets=(1, 2), lengths=(1, 1))]
    """
    whole = Box.whole(shape)
    if whole.numel <= limit:
        return [whole]
    row = whole.numel // shape[0]
    if row > limit:
        inner = row_major_windows(shape[1:], limit)
        return [Box((i, *box.offsets), (1, *box.lengths)) for i in range(shape[0]) for box in inner]
    step = limit // row
    rest_offsets, rest_lengths = whole.offsets[1:], whole.lengths[1:]
    return [
        Box((start, *rest_offsets), (min(step, shape[0] - start), *rest_lengths)) for start in range(0, shape[0], step)
    ]


def boxes_of_flat_range(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The boxes that make up elements `start` to `stop` of the row-major flattened tensor, in order.

    At most `2 * ndim - 1` boxes: a partial row at each end, whole rows between them, and each partial row divided in
    the same way.

    >>> boxes_of_flat_range((4, 4), 2, 9)
    (Box(offsets=(0, 2), lengths=(1, 2)), Box(offsets=(1, 0), lengths=(1, 4)), Box(offsets=(2, 0), lengths=(1, 1)))
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= prod(shape):
        raise LayoutError(f"{start}:{stop} is not a range of the {prod(shape)} elements of a tensor of shape {shape}")
    boxes: list[Box] = []
    _append_boxes(shape, start, stop, (), boxes)
    return tuple(boxes)


def _append_boxes(shape: tuple[int, ...], start: int, stop: int, index: tuple[int, ...], boxes: list[Box]) -> None:
    """Add the boxes of a flat range of the sub-tensor of `shape` that lies at `index` in the leading dims."""
    if start == stop:
        return
    if start == 0 and stop == prod(shape):
        boxes.append(Box(index + (0,) * len(shape), (1,) * len(index) + shape))
        return
    row_shape = shape[1:]
    row = prod(row_shape)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        _append_boxes(row_shape, head, tail, (*index, first), boxes)
        return
    if head:
        _append_boxes(row_shape, head, row, (*index, first), boxes)
        first += 1
    if first < last:
        boxes.append(Box((*index, first) + (0,) * len(row_shape), (1,) * len(index) + (last - first, *row_shape)))
    _append_boxes(row_shape, 0, tail, (*index, last), boxes)
