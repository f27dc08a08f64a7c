"""Adapters of other packages' context-parallel attention; `attention.variants.external` declares them. An adapter and
its package are imported at the first call."""
