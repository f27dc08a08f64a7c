"""Peers: other packages' context-parallel attention, which the program runs beside the library's variants. `runner.peers.function` makes
one a function with the face of `attention.ContextParallel`. Imports without torch."""

from runner.peers.packages import PEERS, Package, everything, missing, variant

__all__ = ["PEERS", "Package", "everything", "missing", "variant"]
