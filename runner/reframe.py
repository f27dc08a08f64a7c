"""The place of a command that is an example in docs/clusters.md now."""

raise SystemExit(
    "error: python -m runner.reframe is gone; docs/clusters.md shows how to write a ReFrame test around a command"
)
