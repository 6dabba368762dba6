"""Attacks by name."""

import dataclasses
from typing import Any

from pydantic import ValidationError

from segprox.attacks.alma_prox import AlmaProx
from segprox.attacks.base import Attack
from segprox.errors import SegproxError

ATTACKS: dict[str, type[Attack]] = {attack.name: attack for attack in (AlmaProx,)}


def make_attack(name: str, **options: Any) -> Attack:
    """The attack of that name with the given hyper-parameters; the others keep the paper's values.

    Values are checked, and may be text as it comes from a command line.

    Example:
        >>> import segprox
        >>> segprox.make_attack("alma-prox", step_size="1e-2").step_size
        0.01
    """
    if name not in ATTACKS:
        raise SegproxError(f"there is no attack {name!r}; known are: {', '.join(sorted(ATTACKS))}")
    cls = ATTACKS[name]
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # every attack is a dataclass
    for option in options:
        if option not in known:
            raise SegproxError(f"{name} has no field {option!r}; its fields are: {', '.join(known)}")
    try:
        return cls(**options)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # a field does not fit another one; the attack says so itself
            raise SegproxError(first["msg"].removeprefix("Value error, ")) from None
        field = ".".join(str(part) for part in first["loc"])
        raise SegproxError(f"{field} of {name} cannot be {first['input']!r}: {first['msg']}") from None
