"""The command that repeats a run."""

import dataclasses
import os
import shlex
from typing import Any

from segprox.data import DATASETS, UNTARGETED
from segprox.errors import SegproxError
from segprox.models import MODELS, SOURCES
from segprox.naming import Name
from segprox.registry import VARIABLE
from segprox.run.plan import AttackEntry, Run, Settings


def repeat_command(run: Run, images: int | None = None) -> str:
    """The `segprox evaluate` that makes the same run: the same folder, and the same key for every image.

    A run of an object without a name, or of what no command can write, is refused with a sentence that says why. The
    limit is raised to as many `images` as the run has by now.

    Example:
        >>> from segprox.run.plan import AttackEntry, Run, Settings
        >>> attack = AttackEntry(name="fmn", set={"steps": 20})
        >>> repeat_command(Run(model="demo-robust", dataset="demo", attack=attack, settings=Settings(limit=3)))
        'segprox evaluate --model demo-robust --dataset demo --attack fmn --set steps=20 --limit 3 --out results'
    """
    for registries, name in (((MODELS, SOURCES), run.model), ((DATASETS,), run.dataset)):
        if not any(Name.parse(name).source in registry.everything() for registry in registries):
            raise SegproxError(f"{name} is the name of an object that was evaluated from Python, or of a plugin")
    fields = {field: str(value) for field, value in run.attack.set.items()}
    try:
        writable = AttackEntry(name=run.attack.name, set=fields).make() == run.attack.make()
    except SegproxError:
        writable = False
    if not writable:
        raise SegproxError(f"{run.attack} has a field that the command line cannot write")
    limit = run.settings.limit and max(run.settings.limit, images or 0)
    plugins = [("--plugin", plugin) for plugin in filter(None, os.environ.get(VARIABLE, "").split(","))]
    options = [
        ("--model", _with_options(run.model, run.settings.model_options)), ("--dataset", run.dataset),
        ("--attack", run.attack.name), *(("--set", f"{field}={value}") for field, value in fields.items()),
        *([] if run.goal == UNTARGETED else [("--target", run.goal)]),
        *_settings(dataclasses.replace(run.settings, limit=limit)), ("--out", "results"),
    ]  # fmt: skip
    return shlex.join(["segprox", *(part for pair in plugins for part in pair), "evaluate",
                       *(part for pair in options for part in pair)])  # fmt: skip


def _settings(settings: Settings) -> list[tuple[str, str]]:
    """Those that are not the default; options of models are in the model's name."""
    found = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name != "model_options" and value != getattr(Settings(), field.name):
            option = f"--{field.name.replace('_', '-')}"
            found += [(option, str(one)) for one in (value if isinstance(value, tuple) else (value,))]
    return found


def _with_options(model: str, given: dict[str, Any]) -> str:
    """A model's name with options, which win over those that it has."""
    options = Name.parse(model).options | {option: _text(option, value) for option, value in given.items()}
    query = "&".join(f"{option}={value}" for option, value in options.items())
    return f"{model.partition('?')[0]}?{query}" if given else model


def _text(option: str, value: Any) -> str:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return ("x" if option == "resize" else ",").join(map(str, parts))
