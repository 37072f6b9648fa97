"""What the actors write into memory: task words, mails, epochs, counters; integer arithmetic shared with the kernel.

Every function takes Python ints or traced integers of the kernel's DSL (pass Int64 there) and uses only + - << >> & |
and // on non-negative values, without a branch or a loop: the megakernel traces these very functions, so the simulator
and the kernel can't disagree about a word.
"""

from __future__ import annotations

from moe_ref.layout import SIDES, ceil_div

# --- shared with the kernel: the task word -------------------------------------------------------------------------
#
#   bit  0        3             14          26             48
#        | kind 3 | column tile 11 | slot 12 | row tile 22 |  mail sequence 15 |
#
# 48 bits of task, so that a mail (sequence, task) is still one non-negative 64-bit word, written by one store.

KIND_BITS, COLUMN_BITS, SLOT_BITS, ROW_BITS = 3, 11, 12, 22
COLUMN_SHIFT = KIND_BITS
SLOT_SHIFT = COLUMN_SHIFT + COLUMN_BITS
ROW_SHIFT = SLOT_SHIFT + SLOT_BITS
TASK_BITS = ROW_SHIFT + ROW_BITS
SEQUENCE_BITS = 63 - TASK_BITS
TASK_MASK = (1 << TASK_BITS) - 1
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1

NONE, DISPATCH, GEMM0, GEMM1, COMBINE, GEMM1_LOW, GEMM1_HIGH, STOP = range(8)
"""Kinds. NONE is zero, so memory that was zeroed once holds no task; STOP ends the actor that reads it. GEMM1_LOW and
GEMM1_HIGH are a GEMM1 task's lower and upper half of the rows, which only the kernel deals."""

KIND_NAMES = {
    NONE: "none", DISPATCH: "dispatch", GEMM0: "gemm0", GEMM1: "gemm1", COMBINE: "combine", GEMM1_LOW: "gemm1",
    GEMM1_HIGH: "gemm1", STOP: "stop",
}  # fmt: skip


def pack_task(kind, slot, row_tile, column_tile):
    """One task as one non-negative integer of TASK_BITS bits.

    slot: local expert slot of a GEMM; peer rank of a Dispatch; 0 for Combine. row_tile: row tile of the owner's
    dispatch buffer (GEMMs, and for Dispatch the one on the peer) or token tile (Combine). Inverse: the `task_*`
    functions below. Arguments beyond their field are not checked here (the kernel can't); `check_fields` does on the
    host.

    >>> word = pack_task(GEMM1, slot=5, row_tile=1000, column_tile=7)
    >>> task_kind(word), task_slot(word), task_row_tile(word), task_column_tile(word)
    (3, 5, 1000, 7)
    """
    return kind | (column_tile << COLUMN_SHIFT) | (slot << SLOT_SHIFT) | (row_tile << ROW_SHIFT)


def task_kind(word):
    """Kind of a packed task (or of a whole mail)."""
    return word & ((1 << KIND_BITS) - 1)


def task_column_tile(word):
    """Column tile of a packed task."""
    return (word >> COLUMN_SHIFT) & ((1 << COLUMN_BITS) - 1)


def task_slot(word):
    """Local expert slot (GEMMs) or peer rank (Dispatch) of a packed task."""
    return (word >> SLOT_SHIFT) & ((1 << SLOT_BITS) - 1)


def task_row_tile(word):
    """Row tile (GEMMs, Dispatch) or token tile (Combine) of a packed task."""
    return (word >> ROW_SHIFT) & ((1 << ROW_BITS) - 1)


# --- shared with the kernel: mails, epochs, counters ---------------------------------------------------------------


def pack_mail(sequence, word):
    """A mail of the Scheduler to a Processor: sequence number (wraps at 2**SEQUENCE_BITS) and task in one word.

    Written by one relaxed 64-bit store; the reader knows it by its sequence, so a mailbox is never cleared. A mail is a
    hint: the reader itself acquires the counter that its task depends on.
    """
    return ((sequence & SEQUENCE_MASK) << TASK_BITS) | word


def mail_sequence(mail):
    """Sequence number of a mail, modulo 2**SEQUENCE_BITS; the first mail of a mailbox has sequence 1."""
    return (mail >> TASK_BITS) & SEQUENCE_MASK


def mail_task(mail):
    """Task word of a mail."""
    return mail & TASK_MASK


def side_of(epoch):
    """Staging side of a call: calls are numbered by the epoch 0, 1, 2, ... and the sides alternate."""
    return epoch & (SIDES - 1)


def counts_signal(epoch):
    """Value that a rank's counts signal takes in call `epoch`: never 0, so zeroed memory means "nothing yet"."""
    return epoch + 1


def next_target(target, expected):
    """Target of a counter for this call: the last target of the same side plus what this call adds.

    Counters are never reset. A peer adds to `seen`; only the owner moves `target`, once per call, when it knows the
    counts. A counter from which this call expects nothing keeps its target and so is reached at once.
    """
    return target + expected


def reached(seen, target):
    """Whether a counter has come as far as this call needs.

    As a difference, so it stays right when 32-bit counters wrap round.
    """
    return seen - target >= 0


# --- shared with the kernel: how many tasks there are (termination is exact) ----------------------------------------


def gemm0_tasks(row_tiles, columns0):
    """GEMM0 tasks of a rank: every row tile that has rows, times the column tiles of the up projection."""
    return row_tiles * columns0


def gemm1_tasks(row_tiles, columns1):
    """GEMM1 tasks of a rank: every row tile that has rows, times the column tiles of the down projection."""
    return row_tiles * columns1


def combine_tasks(tokens, token_rows):
    """Combine tasks of a rank: its tokens in tiles of `token_rows`; also a token without any valid route is written."""
    return ceil_div(tokens, token_rows)
