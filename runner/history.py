"""The place of a command that is `python -m runner.compare A B C ...` now."""

raise SystemExit(
    "error: python -m runner.history is gone; python -m runner.compare A B C ... goes from commit to commit"
)
