"""Models of transformers whose attention is sharded: see `attention.huggingface.model`, which imports transformers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention.huggingface.model import context_parallel

__all__ = ["context_parallel"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attention.huggingface import model

    return getattr(model, name)
