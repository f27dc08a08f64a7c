"""The place of a command that lies beside the tests now."""

raise SystemExit("error: python -m runner.torture is now python -m tests.torture, in a checkout")
