"""How models and datasets are named: `source:identifier?option=value&option=value`."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from pydantic import ValidationError

from segprox.errors import SegproxError

T = TypeVar("T")


@dataclass(frozen=True)
class Name:
    """A parsed name.

    Example:
        >>> Name.parse("voc:/data/VOCdevkit?split=val&size=short-512")
        Name(source='voc', identifier='/data/VOCdevkit', options={'split': 'val', 'size': 'short-512'})
        >>> Name.parse("demo-robust")
        Name(source='demo-robust', identifier='', options={})
    """

    source: str
    identifier: str = ""
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Name":
        """Split a name; what an option may be is for its source to say."""
        plain, _, query = text.partition("?")
        source, _, identifier = plain.partition(":")
        options: dict[str, str] = {}
        for part in query.split("&") if query else []:
            option, equals, value = part.partition("=")
            if not option or not equals:
                raise SegproxError(
                    f"after the ? of a name come options as option=value, joined by &, but {text!r} has {part!r}"
                )
            options[option] = value
        return cls(source, identifier, options)


def checked(make: Callable[..., T], what: str, **options: Any) -> T:
    """Call a pydantic dataclass with options from a user; what does not fit is refused in one sentence.

    Args:
        make: the dataclass.
        what: how a message names the thing that has these options.
        options: its fields, which may be text as it comes from a command line.
    """
    known = [entry.name for entry in fields(make)]  # type: ignore[arg-type]  # a dataclass
    for option in options:
        if option not in known:
            raise SegproxError(f"{what} has no option {option!r}; its options are: {', '.join(known)}")
    try:
        return make(**options)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error" and not first["loc"]:  # a field does not fit another one
            raise SegproxError(first["msg"].removeprefix("Value error, ")) from None
        reason = first["msg"].removeprefix("Value error, ")
        raise SegproxError(f"{first['loc'][0]} of {what} cannot be {first['input']!r}: {reason}") from None
