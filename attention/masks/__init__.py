"""Masks: which keys each query sees. A function for each mask; `a & b` is the intersection; `names()` lists them.
Without torch, except for `Mask.dense`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from attention.errors import nearest
from attention.masks.dca import dca
from attention.masks.documents import block_causal_documents, documents, prefix_lm_documents, shared_prompt
from attention.masks.mask import Mask
from attention.masks.plain import causal, chunked, full, global_window, prefix_lm, rectangles, sliding_window
from attention.masks.tiles import block_sparse

__all__ = [
    "Mask",
    "block_causal_documents",
    "block_sparse",
    "causal",
    "chunked",
    "dca",
    "documents",
    "full",
    "global_window",
    "make",
    "names",
    "prefix_lm",
    "prefix_lm_documents",
    "rectangles",
    "shared_prompt",
    "sliding_window",
]

_FUNCTIONS: tuple[Callable[..., Mask], ...] = (
    full,
    causal,
    sliding_window,
    chunked,
    prefix_lm,
    documents,
    prefix_lm_documents,
    block_causal_documents,
    shared_prompt,
    global_window,
    dca,
    block_sparse,
    rectangles,
)
_BY_NAME = {function.__name__: function for function in _FUNCTIONS}


def names() -> dict[str, str]:
    """Every mask by its name, with the pairs that it keeps as one line: q and k are positions of a query and a key."""
    return {name: (function.__doc__ or "").partition("\n")[0].rstrip(".") for name, function in _BY_NAME.items()}


def make(name: str, /, **parameters: Any) -> Mask:
    """The mask of a name and its parameters, as the command line gives them: `inner` of documents may be a name, or a
    mapping of `name` and parameters. Raises ValueError for an unknown name or parameter, a missing one, or a bad
    value."""
    function = _BY_NAME.get(name)
    if function is None:
        raise ValueError(f"mask={name}: no such mask; {nearest(str(name), _BY_NAME)}")
    known = inspect.signature(function).parameters
    for parameter in parameters:
        if parameter not in known:
            hint = nearest(parameter, known) if known else f"{name} has no parameters"
            raise ValueError(f"{parameter}={parameters[parameter]}: mask {name} has no such parameter; {hint}")
    missing = [x.name for x in known.values() if x.default is x.empty and x.name not in parameters]
    if missing:
        raise ValueError(f"mask={name}: needs {' and '.join(missing)}; its parameters are {', '.join(known)}")
    if "inner" in parameters:
        parameters["inner"] = _inner(parameters["inner"])
    return function(**parameters)


def _inner(value: Any) -> Any:
    """A mask given by its name, or by a mapping of its name and parameters."""
    if isinstance(value, str):
        return make(value)
    if not isinstance(value, Mapping):
        return value
    if "name" not in value:
        raise ValueError(
            f"inner={dict(value)}: has no name; give for instance inner={{name: sliding_window, left: 512}}"
        )
    parameters = {str(key): x for key, x in value.items()}
    return make(parameters.pop("name"), **parameters)
