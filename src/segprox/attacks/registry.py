"""Attacks by name: a class, and the values of its fields that make it what the name says."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import ValidationError

from segprox.attacks.alma import Alma
from segprox.attacks.alma_prox import AlmaProx
from segprox.attacks.anneal import Anneal
from segprox.attacks.apgd import Apgd
from segprox.attacks.asma import Asma
from segprox.attacks.base import Attack, Family, FixedEpsilonAttack
from segprox.attacks.bisection import Bisection
from segprox.attacks.dag import Dag
from segprox.attacks.ddn import Ddn
from segprox.attacks.fmn import Fmn
from segprox.attacks.palma import Palma
from segprox.attacks.pdgd import Pdgd
from segprox.attacks.pdpgd import Pdpgd
from segprox.attacks.pgd import Pgd
from segprox.attacks.sea import Sea
from segprox.attacks.square import Square, SquareMinimal
from segprox.errors import SegproxError
from segprox.naming import Description, describe_fields, refusal
from segprox.registry import Registry

A = TypeVar("A", bound=type)  # of attacks; type checkers do not see through every decorator for dataclasses
BISECT = "bisect:"  # before the name of a fixed-epsilon attack: the minimal attack that bisection makes of it


@dataclasses.dataclass(frozen=True)
class Named:
    """An attack with a name."""

    about: str
    cls: type[Attack]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # other than the class's defaults
    bisected: bool = False  # whether a bisection is wrapped around it
    paper: str | None = None  # if not the class's

    @property
    def citation(self) -> str:
        """Where the attack comes from."""
        return self.paper or self.cls.paper

    @property
    def short_citation(self) -> str:
        """First author, venue and year."""
        if ", " not in self.citation:
            return self.citation
        author, *_, venue = self.citation.split(", ")
        others = "" if author.endswith("et al.") or self.citation.count(",") == 1 else " et al."
        return f"{author}{others}, {venue}"


GOODFELLOW = "Goodfellow, Shlens, Szegedy, Explaining and Harnessing Adversarial Examples, ICLR 2015"
KURAKIN = "Kurakin, Goodfellow, Bengio, Adversarial Examples in the Physical World, ICLR workshop 2017"
DONG = "Dong et al., Boosting Adversarial Attacks with Momentum, CVPR 2018"
GU = "Gu et al., SegPGD: An Effective and Efficient Adversarial Attack for Segmentation, ECCV 2022"
AGNIHOTRI = "Agnihotri, Jung, Keuper, CosPGD: an Efficient White-Box Attack for Pixel-Wise Prediction, ICML 2024"
CISSE = "Cisse et al., Houdini: Fooling Deep Structured Prediction Models, NeurIPS 2017"
TSALLIS = "TsallisPGD, 2026"

I_FGSM = {"steps": 20, "step_size": 1 / 20}
PGD_10 = {"steps": 10, "step_size": 0.125, "restarts": 4}
PER_PIXEL = {"steps": 20, "step_size": 0.32, "random_start": True}  # a step of 0.01 at epsilon = 8/255

ATTACKS: Registry[Named] = Registry(
    "attack",
    {
        "palma": Named("augmented Lagrangian in a ball that fits itself: the smallest norms", Palma),
        "palma-8bit": Named("the same among valid 8-bit images", Palma, {"bits": 8}),
        "alma-prox": Named("augmented Lagrangian with a proximal step: the paper's attack", AlmaProx),
        "alma": Named("augmented Lagrangian, norm in the loss", Alma),
        "asma": Named("adaptive steps towards a target mask", Asma),
        "dag-0.003": Named("normalised gradient steps until success", Dag, {"step_size": 0.003}),
        "dag-0.001": Named("the same with the paper's smaller step", Dag, {"step_size": 0.001}),
        "ddn": Named("gradient steps on a sphere that shrinks and grows", Ddn),
        "fmn": Named("gradient steps in a ball that shrinks and grows", Fmn),
        "pdgd": Named("primal-dual descent, norm in the loss", Pdgd),
        "pdpgd": Named("primal-dual descent with a proximal step", Pdpgd),
        "i-fgsm-13x20": Named("bisection over I-FGSM", Pgd, I_FGSM, bisected=True, paper=KURAKIN),
        "mi-fgsm-13x20": Named("bisection over MI-FGSM", Pgd, {**I_FGSM, "momentum": 1.0}, bisected=True, paper=DONG),
        "pgd-ce-13x40": Named("bisection over PGD", Pgd, bisected=True),
        "pgd-ce-13x4x10": Named("bisection over PGD with restarts", Pgd, PGD_10, bisected=True),
        "pgd-dlr-13x40": Named("bisection over PGD on DLR", Pgd, {"objective": "dlr"}, bisected=True),
        "pgd-dlr-13x4x10": Named(
            "bisection over PGD on DLR with restarts", Pgd, {**PGD_10, "objective": "dlr"}, bisected=True
        ),
        "fgsm": Named("one step of length epsilon", Pgd, {"steps": 2, "step_size": 1.0}, paper=GOODFELLOW),
        "i-fgsm": Named("20 steps from the image", Pgd, I_FGSM, paper=KURAKIN),
        "mi-fgsm": Named("the same with momentum", Pgd, {**I_FGSM, "momentum": 1.0}, paper=DONG),
        "pgd": Named("projected gradient ascent on any objective", Pgd),
        "segpgd": Named("PGD, wrong pixels ever more in the loss", Pgd, {**PER_PIXEL, "objective": "segpgd"}, paper=GU),
        "cospgd": Named(
            "PGD, pixels weighted by cosine similarity", Pgd, {**PER_PIXEL, "objective": "cospgd"}, paper=AGNIHOTRI
        ),
        "houdini": Named("PGD on the Houdini loss", Pgd, {"objective": "houdini"}, paper=CISSE),
        "apgd": Named("PGD with its own step size, in shrinking balls", Apgd),
        "tsallis": Named("APGD on the Tsallis loss, q from -2 to 1", Apgd, {"objective": "tsallis"}, paper=TSALLIS),
        "anneal": Named("momentum on a smoothed APSR, ever finer: the most damage", Anneal),
        "sea": Named("the worst of three APGD", Sea),
        "square": Named("random search with squares, without gradients", Square),
        "square-minimal": Named("random search with squares, without gradients, for the smallest norm", SquareMinimal),
    },
)

# Table 1 of the paper, in its order.
PAPER_ATTACKS = (
    "i-fgsm-13x20", "mi-fgsm-13x20", "pgd-ce-13x40", "pgd-ce-13x4x10", "pgd-dlr-13x40", "pgd-dlr-13x4x10",
    "dag-0.003", "dag-0.001", "fmn", "pdpgd", "alma-prox",
)  # fmt: skip


def find_attack(name: str) -> Named:
    """The entry of that name; `bisect:NAME` is the bisection over a fixed-epsilon attack."""
    plain = name.removeprefix(BISECT)
    entry = ATTACKS.find(plain)
    if not name.startswith(BISECT):
        return entry
    if entry.bisected or not issubclass(entry.cls, FixedEpsilonAttack):
        raise SegproxError(f"{plain} is a minimal attack already: there is nothing to bisect")
    return dataclasses.replace(entry, about=f"bisection over {plain}", bisected=True)


def make_attack(name: str, /, **options: Any) -> Attack:
    """The attack of that name with the given hyper-parameters; the others keep the paper's values.

    Values are checked, and may be text as it comes from a command line.

    Example:
        >>> import segprox
        >>> segprox.make_attack("alma-prox", step_size="1e-2").step_size
        0.01
        >>> segprox.make_attack("pgd", epsilon="4/255", objective="dlr").epsilon
        0.01568...
        >>> segprox.make_attack("bisect:cospgd", rounds=8).cost()
        Cost(forwards=160, backwards=152)
    """
    entry = find_attack(name)
    known = field_names(entry)
    for option in options:
        if option not in known:
            raise SegproxError(f"{name} has no field {option!r}; its fields are: {', '.join(known)}")
    outer = {option: options.pop(option) for option in BISECTION_FIELDS if entry.bisected and option in options}
    try:
        attack = entry.cls(**{**entry.fields, **options})
        return Bisection(attack=attack, **outer) if entry.bisected else attack  # type: ignore[arg-type]  # a fixed-epsilon one
    except ValidationError as error:
        raise refusal(error, name) from None


def register_attack(name: str, about: str | None = None, **fields: Any) -> Callable[[A], A]:
    """A decorator that gives a class of attacks a name, to be used wherever attacks are named.

    Args:
        name: the name.
        about: what the attack does, in a few words; the first line of the class's docstring if left out.
        fields: values other than the class's defaults.

    Example:
        >>> import segprox
        >>> _ = segprox.register_attack("palma-brief", "PALMA for the impatient", steps=20)(segprox.Palma)
        >>> segprox.make_attack("palma-brief").steps
        20
    """

    def decorate(cls: A) -> A:
        if not (isinstance(cls, type) and issubclass(cls, Attack) and dataclasses.is_dataclass(cls)):
            raise SegproxError(
                f"the attack {name!r} must be a dataclass that inherits MinimalAttack or FixedEpsilonAttack, "
                f"but is {cls!r}"
            )
        first = (cls.__doc__ or name).strip().splitlines()[0]
        ATTACKS.register(name, Named(about or first, cls, fields), cls)
        return cls

    return decorate


def list_attacks(family: Family | None = None) -> list[str]:
    """The names of all attacks, or of one family: `minimal` or `fixed-epsilon`.

    Example:
        >>> import segprox
        >>> "palma" in segprox.list_attacks("minimal"), "palma" in segprox.list_attacks("fixed-epsilon")
        (True, False)
    """
    names = list(ATTACKS.everything())
    return names if family is None else [name for name in names if make_attack(name).family == family]


BISECTION_FIELDS = ("rounds", "stop_early", "keep")


def field_names(entry: Named) -> list[str]:
    """The hyper-parameters that may be given by name."""
    names = [field.name for field in dataclasses.fields(entry.cls)]  # type: ignore[arg-type]  # attacks are dataclasses
    if not entry.bisected:
        return names
    return [*BISECTION_FIELDS, *(name for name in names if name != "epsilon")]  # which bisection chooses itself


def describe(attack: Attack) -> list[Description]:
    """The hyper-parameters of an attack with their values; of a bisection, those of the attack within as well."""
    inner = describe_fields(attack.attack) if isinstance(attack, Bisection) else []
    own = [field for field in describe_fields(attack) if field.name != "attack"]
    return [*own, *(field for field in inner if field.name != "epsilon")]


def norms(attack: Attack) -> str:
    """The norms that an attack can be asked for."""
    owner = attack.attack if isinstance(attack, Bisection) else attack
    return ", ".join(get_args(get_type_hints(type(owner))["norm"]) or [attack.norm])
