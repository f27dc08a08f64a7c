"""Faults and bad input at random, tried on the real program: `python -m runner.torture`."""
