"""Small pieces of attacks that `torch.compile` makes one kernel of, where that is asked for.

An attack adapts a few numbers per image with many tiny operations. On an accelerator each of them is a launch, which
takes longer than what it computes. Pieces that only compute are marked `fusible`; within `fusing(True)` they are
compiled when they are first used, which takes some seconds each. Results are the same to rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Made = TypeVar("Made")

_asked: ContextVar[bool] = ContextVar("fusing", default=False)


def fusible(piece: Callable[Given, Made]) -> Callable[Given, Made]:
    """Mark a function of tensors, or a method that changes tensors of its object, as one that may be compiled."""

    @wraps(piece)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        made: Made = (compiled(piece) if _asked.get() else piece)(*args, **kwargs)
        return made

    return run


@contextmanager
def fusing(asked: bool) -> Iterator[None]:
    """Compile fusible pieces within the block, if that is `asked` for."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


@cache
def compiled(piece: Callable[..., Any]) -> Callable[..., Any]:
    """The piece, compiled as a whole: one that cannot be is an error, not a slower piece."""
    return torch.compile(piece, fullgraph=True)
