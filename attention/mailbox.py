"""How the fused tree reduction lays out what ranks write into each other's memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass

PIECE = 32  # elements of a row that travel together with their LSE and a flag of their own


@dataclass(frozen=True)
class Mailbox:
    """A rank's fp32 memory, zero at first, that the `world` ranks write `rows` rows of partial results into, each of `head_dim`
    elements in pieces: two slots of each rank's pieces, then of their LSEs, then of flags (whether a piece is there), and one
    number a piece, which slot is next (read and written by this rank alone). Two slots are enough: a peer is two calls on only
    when this rank has written its part of the one between."""

    world: int
    rows: int
    head_dim: int

    @property
    def row_pieces(self) -> int:
        return -(-self.head_dim // PIECE)

    @property
    def pieces(self) -> int:
        return self.rows * self.row_pieces

    @property
    def lses(self) -> int:
        """Where they begin, in elements, as the next two."""
        return 2 * self.world * self.pieces * PIECE

    @property
    def flags(self) -> int:
        return self.lses + 2 * self.world * self.pieces

    @property
    def turns(self) -> int:
        return self.flags + 2 * self.world * self.pieces

    @property
    def numel(self) -> int:
        return self.turns + self.pieces

    @property
    def received_bytes(self) -> int:
        """By a rank in a call, without the flags."""
        return (self.world - 1) * self.rows * (self.head_dim + self.row_pieces) * 4
