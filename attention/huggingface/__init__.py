"""Context parallelism for any model of transformers that uses its attention interface.

    cp = context_parallel(model, "zigzag")            # once, on every rank
    batch = cp.shard(input_ids=ids, labels=labels)    # this rank's tokens
    loss = model(**batch).loss                        # this rank's part of the global mean
    loss.backward()
    cp.reduce_gradients()

Generation with the keys sharded over the ranks:

    cp = context_parallel(model, "tree")
    model.generate(ids, past_key_values=cp.cache(tokens=4096))

What a model asks of its attention is done, or refused by its name: masks, keyword arguments, padding, dropout."""

from __future__ import annotations

try:
    from attention.huggingface.model import HuggingFace, context_parallel
except ImportError as error:
    if not (error.name or "").startswith("transformers"):
        raise
    raise ImportError(f"{error}: pip install 'attention-runner[huggingface]'", name=error.name) from error

__all__ = ["HuggingFace", "context_parallel"]
