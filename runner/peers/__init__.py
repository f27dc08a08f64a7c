"""Adapters of other packages' context-parallel attention; `runner.peers.packages` declares them. An adapter and
its package are imported at the first call."""
