"""How the fused tree reduction lays out what ranks write into each other's memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass

PIECE = 32  # elements of a row that travel together with their LSE and a flag of their own
LEAST = 1024  # pieces that a mailbox has room for


def pieces(rows: int, head_dim: int) -> int:
    """Of so many rows of partial results."""
    return rows * -(-head_dim // PIECE)


def received_bytes(world: int, rows: int, head_dim: int) -> int:
    """By a rank in a call, without the flags."""
    return (world - 1) * 4 * (rows * head_dim + pieces(rows, head_dim))


@dataclass(frozen=True)
class Mailbox:
    """A rank's fp32 memory, zero at first, that the `world` ranks write up to `capacity` pieces each into: two slots of each
    rank's pieces, then of their LSEs, then of flags (whether a piece is there), and one number a piece, which slot is next
    (read and written by this rank alone). Two slots are enough: a peer is two calls on only when this rank has written its
    part of the one between. As every piece has its own, calls of any shapes may follow each other. Behind them each piece has a
    mark of whether this rank waits for it."""

    world: int
    capacity: int

    @staticmethod
    def holding(world: int, n: int) -> Mailbox:
        """With room for n pieces, and for more: by powers of two."""
        return Mailbox(world, max(LEAST, 1 << (n - 1).bit_length()))

    @property
    def lses(self) -> int:
        """Where they begin, in elements, as the next two."""
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
        """Whether that rank's piece is there: where it stands."""
        return self.flags + (turn * self.world + rank) * self.capacity + piece
