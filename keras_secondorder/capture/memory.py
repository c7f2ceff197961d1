"""The memory plan: which form each side of a Kronecker block has."""

import math
import os
from typing import NamedTuple

FLOAT_BYTES = 4
# Below this side a further split saves little, and the factor becomes diagonal.
_SMALLEST_SPLIT = 32
# From this many times its rank on a factor is inverted as one of low rank.
_RANKS = 3


class Side(NamedTuple):
    """One factor of a block: a stack of matrices, full, split or diagonal.

    Attributes:
        stack: Number of matrices, one for each group of features.
        size: Rows of each of them.
        blocks: Diagonal blocks that each is cut into: 1 for a full matrix, `size` for
            a diagonal one.
        rank: Rank of what its inverse is apart from a multiple of the identity, or 0
            for an inverse without such a form.
    """

    stack: int
    size: int
    blocks: int = 1
    rank: int = 0

    @property
    def width(self) -> int:
        """Rows of one diagonal block; the last one may be padded with zeros."""
        return -(-self.size // self.blocks)

    @property
    def shape(self) -> tuple:
        """Shape of the factor: a matrix, or a stack of all blocks."""
        count = self.stack * self.blocks
        lead = () if count == 1 else (count,)
        return (*lead, self.width, self.width)

    @property
    def bytes(self) -> int:
        """Memory of the factor in float32."""
        return math.prod(self.shape) * FLOAT_BYTES

    @property
    def inverse_bytes(self) -> int:
        """Memory of its inverse."""
        if not self.rank:
            return self.bytes
        return (self.rank * (self.size + self.rank) + 1) * FLOAT_BYTES

    @property
    def product_cost(self) -> int:
        """Multiplications of a vector by its inverse; for a full matrix."""
        if not self.rank:
            return self.size**2
        return self.rank * (2 * self.size + self.rank)

    def __str__(self):
        times = f"{self.stack} of " if self.stack > 1 else ""
        if self.rank:
            return f"{self.size} x {self.size} (inverse of rank {self.rank})"
        if self.blocks == 1:
            return f"{times}{self.size} x {self.size}"
        if self.width == 1:
            return f"{times}{self.size} (diagonal)"
        return f"{times}{self.size} x {self.size} in {self.blocks} blocks"

    def halved(self) -> "Side":
        """With twice as many blocks, or diagonal where they would be tiny."""
        blocks = 2 * self.blocks
        if -(-self.size // blocks) < _SMALLEST_SPLIT:
            return self._replace(blocks=self.size, rank=0)
        # As many blocks as are not empty, at that width.
        width = -(-self.size // blocks)
        return self._replace(blocks=-(-self.size // width), rank=0)


def sides_of(
    wrapper, max_factor_size: int, rank: int | None = None
) -> list[tuple[Side, ...]]:
    """The sides of each part of a layer's block, before any budget.

    Args:
        wrapper: The layer wrapper.
        max_factor_size: A side larger than this is diagonal.
        rank: Rank of the inverses of those that are three times as large, or None.

    Returns:
        `(A, G)` for each affine map, or `(F,)` for a unitwise block.
    """

    def side(stack, size, diagonal=False):
        if diagonal or size > max_factor_size:
            return Side(stack, size, size)
        low = rank is not None and stack == 1 and size >= _RANKS * rank
        return Side(stack, size, rank=rank if low else 0)

    if wrapper.kind == "unitwise":
        return [(Side(wrapper.stack, len(wrapper.variables)),)]
    return [
        (side(p.stack, p.d_in, p.one_hot), side(p.stack, p.d_out))
        for p in wrapper.parts
    ]


def eigenvalue_shape(sides: tuple[Side, Side]) -> tuple:
    """Shape of the eigenvalues of `A (x) G`: that of its weights, padded."""
    a, g = (side.blocks * side.width for side in sides)
    return (a, g) if sides[0].stack == 1 else (sides[0].stack, a, g)


def bytes_of(parts: list[tuple[Side, ...]], eigenvalues: bool = False) -> int:
    """Memory of one block's running factors and of what is kept of them.

    Args:
        parts: The sides of each affine map, or of a unitwise block.
        eigenvalues: Whether the eigenvalues of `A (x) G` are kept beside its bases.
    """
    total = sum(s.bytes + s.inverse_bytes for sides in parts for s in sides)
    if eigenvalues:
        pairs = [sides for sides in parts if len(sides) == 2]
        total += FLOAT_BYTES * sum(math.prod(eigenvalue_shape(p)) for p in pairs)
    return total


def fit_to(
    budget: int, blocks: list[list[tuple[Side, ...]]], eigenvalues: bool = False
) -> list:
    """Split the largest factors until all of them, and their inverses, fit.

    Args:
        budget: Bytes.
        blocks: The sides of each block.
        eigenvalues: Whether the blocks keep eigenvalues too, which nothing splits.

    Returns:
        The same structure, with smaller sides where that is needed.
    """
    sides = {
        (i, j, k): side
        for i, parts in enumerate(blocks)
        for j, pair in enumerate(parts)
        for k, side in enumerate(pair)
    }

    def pair_of(place):
        return tuple(sides[*place[:2], k] for k in range(2))

    total = sum(bytes_of(parts, eigenvalues) for parts in blocks)
    # The matrices of a unitwise block are tiny already.
    large = [place for place in sides if len(blocks[place[0]][place[1]]) == 2]
    while total > budget and any(sides[place].width > 1 for place in large):
        place = max(large, key=lambda p: (sides[p].bytes * (sides[p].width > 1), p))
        total -= bytes_of([pair_of(place)], eigenvalues)
        sides[place] = sides[place].halved()
        total += bytes_of([pair_of(place)], eigenvalues)
    return [
        [
            tuple(sides[i, j, k] for k in range(len(pair)))
            for j, pair in enumerate(parts)
        ]
        for i, parts in enumerate(blocks)
    ]


def machine_budget() -> int | None:
    """A quarter of the machine's memory in bytes, or None where it is not known."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    except (AttributeError, OSError, ValueError):
        return None
