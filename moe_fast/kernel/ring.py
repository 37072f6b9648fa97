"""Barriers in a ring: which one, and its phase, from a running number.

By bits where the size of the ring is a power of two: a remainder takes half a dozen instructions, each of which waits
for the one before, and between two tasks nothing hides them.
"""

from __future__ import annotations


def ring_place(number, size: int):
    """Place of a running number, from 0, in a ring of `size`. Traced by the kernel."""
    return number & (size - 1) if size & (size - 1) == 0 else number % size


def ring_phase(number, size: int):
    """0 in even rounds of the ring, 1 in odd ones. Traced by the kernel."""
    return (number >> (size.bit_length() - 1) if size & (size - 1) == 0 else number // size) & 1
