"""What an audit runs: a minimal and a fixed-epsilon attack of one norm."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from segprox.attacks import Attack, find_attack
from segprox.attacks.registry import field_names
from segprox.errors import SegproxError
from segprox.run.objects import describe_entry
from segprox.run.plan import AttackEntry


def audit_entries(
    minimal: str | Attack, fixed: str | Attack, epsilon: float | str, fields: Mapping[str, Any]
) -> tuple[AttackEntry, AttackEntry]:
    """The two attacks of an audit, of which the second stays within epsilon.

    A field goes to those attacks that are given by their name and have it.

    Example:
        >>> [str(entry) for entry in audit_entries("palma", "pgd", "8/255", {"steps": 20, "objective": "dlr"})]
        ['palma steps=20', 'pgd steps=20 objective=dlr epsilon=8/255']
    """
    known = {attack: field_names(find_attack(attack)) for attack in (minimal, fixed) if isinstance(attack, str)}
    for field in fields:
        if field == "epsilon":
            raise SegproxError("an audit has one epsilon for both attacks: give it as epsilon, not among their fields")
        if not any(field in own for own in known.values()):
            lists = "".join(f"; the fields of {attack} are: {', '.join(own)}" for attack, own in known.items())
            raise SegproxError(f"no attack of the audit that is given by its name has a field {field!r}{lists}")
    first, second = (
        AttackEntry(name=attack, set={field: fields[field] for field in fields if field in known[attack]})
        if isinstance(attack, str)
        else describe_entry(attack)
        for attack in (minimal, fixed)
    )
    second = replace(second, set=second.set | {"epsilon": epsilon})
    one, other = first.make(), second.make()
    if one.family != "minimal":
        raise SegproxError("an audit needs a minimal attack first, such as palma; see: segprox list attacks")
    if other.family != "fixed-epsilon":
        raise SegproxError("an audit needs a fixed-epsilon attack second, such as anneal; see: segprox list attacks")
    if one.norm != other.norm:
        raise SegproxError(f"an audit needs two attacks of one norm, not {one.norm} and {other.norm}")
    return first, second
