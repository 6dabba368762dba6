import sys

import pytest
from hypothesis import settings

# The time of an example says nothing on a busy machine: torch's first calls alone may take half a second.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture
def segprox(monkeypatch, capsys):
    """The command line in this process: call it with arguments, get exit code, output and errors."""
    from segprox.cli import main

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["segprox", *map(str, arguments)])
        monkeypatch.setattr("segprox.cli.base.out.width", 100, raising=False)
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call
