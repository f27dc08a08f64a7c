"""The program: composes, launches, checks, times and records attention experiments."""
