"""The layout of the memory into which ranks write their partial results in the fused tree reduction. No torch."""

from __future__ import annotations

from dataclasses import dataclass

PIECE = 32  # elements of a row that travel together, with their LSE and one flag
LEAST = 1024  # pieces: the smallest capacity of a mailbox


def pieces(rows: int, head_dim: int) -> int:
    """The number of pieces in `rows` rows of partial results."""
    return rows * -(-head_dim // PIECE)


def received_bytes(world: int, rows: int, head_dim: int) -> int:
    """Bytes that one rank receives in a call, without the flags."""
    return (world - 1) * 4 * (rows * head_dim + pieces(rows, head_dim))


@dataclass(frozen=True)
class Mailbox:
    """Offsets, in fp32 elements, into one rank's mailbox. Each of `world` ranks writes up to `capacity` pieces into it.
    The memory starts as zeros and holds, in this order:

    - two slots of each rank's pieces, then two of their LSEs, then two of their flags (1: the piece has arrived);
    - `turns`: for each piece the slot of the next call, read and written by this rank alone;
    - `marks`: for each piece whether this rank waits for it.

    Two slots are enough: a rank can start the call after next only once this rank has written its part of the next one.
    Every piece has its own turn, so calls of different shapes may follow each other."""

    world: int
    capacity: int

    @staticmethod
    def holding(world: int, n: int) -> Mailbox:
        """A mailbox for at least n pieces; capacities are powers of two."""
        return Mailbox(world, max(LEAST, 1 << (n - 1).bit_length()))

    @property
    def lses(self) -> int:
        """Where the LSEs begin, in elements; likewise the properties below."""
        return 2 * self.world * self.capacity * PIECE

    @property
    def flags(self) -> int:
        return self.lses + 2 * self.world * self.capacity

    @property
    def turns(self) -> int:
        return self.flags + 2 * self.world * self.capacity

    @property
    def marks(self) -> int:
        return self.turns + self.capacity

    @property
    def numel(self) -> int:
        return self.marks + self.capacity

    def flag(self, turn: int, rank: int, piece: int) -> int:
        """Where the flag of that rank's piece lies."""
        return self.flags + (turn * self.world + rank) * self.capacity + piece
