"""Everything that starts work on a GPU: `submit` is the one way to launch, `strategy` says whether launches are made
anew or replayed."""

from attention.runtime.submit import submit

__all__ = ["submit"]
