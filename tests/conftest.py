import os
import sys

import pytest
import torch
from hypothesis import settings

# The time of an example says nothing on a busy machine: torch's first calls alone may take half a second.
# Every run has the same examples, so a failure is due to a change; `--hypothesis-profile=explore` tries others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def random_numbers():
    """The same in a test whichever ran before it; `SEED=7 pytest` tries others."""
    torch.manual_seed(int(os.environ.get("SEED", 0)))


@pytest.fixture
def segprox(request, monkeypatch, capsys):
    """The command line in this process: call it with arguments, get exit code, output and errors.

    Its console is `WIDTH` wide, if a module of tests says so.
    """
    from segprox.cli import main

    width = getattr(request.module, "WIDTH", 100)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["segprox", *map(str, arguments)])
        monkeypatch.setattr("segprox.cli.base.out.width", width, raising=False)
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def batch_sizes(monkeypatch):
    """How many images FMN attacks at a time, in a list that grows."""
    from segprox.attacks import Fmn

    sizes, run = [], Fmn.run

    def counted(self, model, problem, *rest, **options):
        sizes.append(len(problem))
        return run(self, model, problem, *rest, **options)

    monkeypatch.setattr(Fmn, "run", counted)
    return sizes


@pytest.fixture
def segprox_cli(segprox):
    """The same, where the name of the package is needed for the package."""
    return segprox
