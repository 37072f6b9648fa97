"""Tile pairs: what a processor of two blocks takes at a time, and which rows go along.

An expert's row tiles are taken in twos, so that both blocks of a pair multiply by the same weights:

    whole   two row tiles, one for each block
    wide    the last one of an odd number, for both blocks: each computes every other column tile of it
    mixed   the only tiles of two experts, one for each block, each with weights of its own: where an expert has one
            tile its weights come from memory, and two streams of them bring as much as one

The last row tile of an expert may hold a handful of rows; a task of its own would stream all of the expert's weights
for them. Where it holds at most CARRIED_ROWS, and isn't the expert's only one, its rows are computed by the tasks of
the expert's last tile pair, from the same weights in shared memory: in a whole one, where both blocks have the same
weights, half of a column tile by each; in a wide or a mixed one a column tile by the block that has its weights. The
carried tile's place in the dispatch buffer, its arrival counter and its hidden rows stay what they are; only nobody
deals its tasks.

Tile pairs have numbers: those of two or more tiles by expert, then the mixed ones. Member m of pair u is dealt as
2 u + m; by these numbers go `tile_slot`, `tile_rows` (the fields below) and `tile_at`, the member's row tile.
`dealt_at` leads from a row tile to its rows and the first member that computes it.

Arithmetic of Python ints or of the kernel's integers, without a branch.
"""

from __future__ import annotations

from moe_fast.kernel.constants import CARRIED_ROWS, TILE_ROWS
from moe_ref.layout import ceil_div

# --- fields: what a block must know of a row tile beside the task; in a task word from FIELDS_SHIFT on ---------------
#
#   bit  0        7        8         9              15
#        | rows-1 | same 1 | wide 1 | carried rows 6 | early 1, in a task word void 1 |

SAME_BIT, WIDE_BIT, FEW_SHIFT, EARLY_BIT = 7, 8, 9, 15
EARLY = 1 << EARLY_BIT
"""All rows that the tile's tasks need are among the first ones of their own rank."""
FIELDS = EARLY - 1
VOID = 1 << EARLY_BIT
"""In a task word, where EARLY has no place: a block keeps step with the other, but computes and stores nothing."""
DEALT_BITS = 24
"""Of a number that a row tile is dealt as, in a word of `dealt_at`."""
SINGLES_SHIFT = 22
"""In the planner's sums over slots: tile pairs below, experts with one tile above."""


def pack_fields(rows, same, wide, few):
    """rows: of the row tile, 1 to T. same: whether both members multiply by the same weights. wide: whether they share
    a row tile. few: carried rows."""
    return (rows - 1) | (same << SAME_BIT) | (wide << WIDE_BIT) | (few << FEW_SHIFT)


def field_rows(fields):
    """Rows of the row tile that are no padding."""
    return (fields & (TILE_ROWS - 1)) + 1


def field_same(fields):
    """1 if both members multiply by the same weights, else 0."""
    return (fields >> SAME_BIT) & 1


def field_wide(fields):
    """1 if each member has every other column tile of one row tile, else 0."""
    return (fields >> WIDE_BIT) & 1


def field_void(fields):
    """1 if there is nothing to compute, else 0."""
    return (fields >> EARLY_BIT) & 1


def field_few(fields):
    """Carried rows, 0 to CARRIED_ROWS."""
    return (fields >> FEW_SHIFT) & (2 * CARRIED_ROWS - 1)


def carried_tile(fields, member, tile):
    """Row tile of the rows that go along with a member's tile `tile`; `tile` itself where there are none."""
    some = at_least(field_few(fields), 1)
    return tile + some * (1 + field_same(fields) * (1 - member))


def pack_dealt(number, rows):
    """A word of `dealt_at`: the first number that a row tile is dealt as, 0 for a carried one, and its rows, 1 to T."""
    return number | ((rows - 1) << DEALT_BITS)


def dealt_number(word):
    """The first number that a row tile is dealt as."""
    return word & ((1 << DEALT_BITS) - 1)


def dealt_rows(word):
    """Rows of a row tile."""
    return (word >> DEALT_BITS) + 1


# --- an expert's rows ------------------------------------------------------------------------------------------------


def at_least(value, limit: int):
    """1 if value >= limit, else 0; for values far from the ends of int32."""
    return 1 + ((value - limit) >> 31)


def carried_rows(rows, carries: bool):
    """Rows of an expert with `rows` rows that have no tasks of their own."""
    rest = rows % TILE_ROWS
    few = (1 - at_least(rest, CARRIED_ROWS + 1)) & at_least(rows, TILE_ROWS + 1) & int(carries)
    return rest * few


def own_tiles(rows, carries: bool):
    """Row tiles of an expert with `rows` rows that have tasks of their own."""
    return ceil_div(rows - carried_rows(rows, carries), TILE_ROWS)


def count_pairs(rows, carries: bool):
    """What an expert with `rows` rows adds to the planner's sums: its tile pairs, or one to those with one tile."""
    tiles = own_tiles(rows, carries)
    single = at_least(tiles, 1) - at_least(tiles, 2)
    return ((tiles + 1) // 2) * (1 - single) + (single << SINGLES_SHIFT)


def dealt_tiles(total):
    """Numbers that are dealt, from the sum of `count_pairs` over all slots: two for each tile pair."""
    return 2 * ((total & ((1 << SINGLES_SHIFT) - 1)) + ((total >> SINGLES_SHIFT) + 1) // 2)


def place_tile(tile, rows, before, total, carries: bool):
    """(first number that the expert's row tile `tile` is dealt as, its fields).

    rows: the expert's; before, total: sums of `count_pairs` over the slots before the expert's, and over all. The
    second member of a wide tile has the next number and the same fields. Not for a carried tile.
    """
    tiles, few = own_tiles(rows, carries), carried_rows(rows, carries)
    mask = (1 << SINGLES_SHIFT) - 1
    single = 1 - at_least(tiles, 2)
    place = before >> SINGLES_SHIFT
    last = tiles - 1
    # the expert's last tile is wide where it has no neighbour: neither one of its own, nor another expert's only one
    lone = single & at_least(place + 1 - (total >> SINGLES_SHIFT), 0) & (1 - (place & 1))
    odd = (1 - single) & (tiles & 1) & (1 - at_least(last - tile, 1))
    wide = lone | odd
    several = 2 * (before & mask) + tile
    number = several * (1 - single) + (2 * (total & mask) + place) * single
    same = (1 - single) & (1 - odd)
    with_last = 1 - at_least(last // 2 - tile // 2, 1)
    left = rows - tile * TILE_ROWS
    full = at_least(left, TILE_ROWS)
    filled = TILE_ROWS * full + left * (1 - full)
    return number, pack_fields(filled, same, wide, few * with_last)
