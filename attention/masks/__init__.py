"""Masks: which keys each query sees. A function for each mask; `a & b` is the intersection; `names()` lists them."""
