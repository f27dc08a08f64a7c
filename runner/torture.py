"""The place of a command that lies beside the tests now."""

raise SystemExit(
    "error: python -m runner.torture is now pytest -m nightly tests/program/test_torture.py, in a checkout"
)
