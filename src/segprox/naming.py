"""How models and datasets are named, `source:identifier?option=value&option=value`, and how options are checked."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ValidationError
from pydantic.fields import FieldInfo

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
            if option in options:
                raise SegproxError(f"{text!r} says {option} twice; leave one of them out")
            options[option] = value
        return cls(source, identifier, options)


def checked(make: Callable[..., T], what: str, /, **options: Any) -> T:
    """Call a pydantic dataclass with options from a user; what does not fit is refused in one sentence.

    Options may be text as it comes from a command line; `what` is how a message names the thing that has them.
    """
    known = [entry.name for entry in fields(make)]  # type: ignore[arg-type]  # a dataclass
    for option in options:
        if option not in known:
            raise SegproxError(f"{what} has no option {option!r}; its options are: {', '.join(known)}")
    try:
        return make(**options)
    except ValidationError as error:
        raise refusal(error, what) from None


def read_fraction(value: Any) -> Any:
    """A number from "8/255" as people write it; anything else is left to whoever checks it.

    Example:
        >>> read_fraction("1/4"), read_fraction("0.5/2"), read_fraction("0.25"), read_fraction(0.25)
        (0.25, 0.25, '0.25', 0.25)
    """
    if not isinstance(value, str) or "/" not in value:
        return value
    try:
        numerator, denominator = map(Fraction, value.split("/"))
        return float(numerator / denominator)
    except (ValueError, ZeroDivisionError):
        return value


def read_share(value: Any) -> Any:
    """A share from "5%" or a fraction; anything else is left to whoever checks it.

    Example:
        >>> read_share("5%"), read_share("1/20"), read_share("many")
        (0.05, 0.05, 'many')
    """
    try:
        return float(value[:-1]) / 100 if isinstance(value, str) and value.endswith("%") else read_fraction(value)
    except ValueError:
        return value


def refusal(error: ValidationError, what: str) -> SegproxError:
    """What to tell the user of the first field that does not fit."""
    first = error.errors()[0]
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and not first["loc"]:  # a field does not fit another one: the reason names them
        return SegproxError(reason)
    return SegproxError(f"{first['loc'][0]} of {what} cannot be {first['input']!r}: {reason}")


class Choices:
    """In the type of a field: the names that it may have, listed where the field is described."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = names


class Description(NamedTuple):
    """A field, for people."""

    name: str
    default: str
    meaning: str


def describe_fields(made: Any) -> list[Description]:
    """The fields of a dataclass with their values, and with what they mean where their types say so."""
    described, hints = [], get_type_hints(type(made), include_extras=True)
    for name in (entry.name for entry in fields(made)):
        annotation, value = hints[name], getattr(made, name)
        info = next((part for part in get_args(annotation) if isinstance(part, FieldInfo)), None)
        kind = get_args(annotation)[0] if info else annotation
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        choices = next((tuple(part.names) for part in get_args(annotation) if isinstance(part, Choices)), choices)
        among = f" ({', '.join(map(str, choices))})" if len(choices) > 1 else ""
        shown = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
        meaning = info.description if info and info.description else ""
        described.append(Description(name, shown, f"{meaning}{among}".strip()))
    return described
