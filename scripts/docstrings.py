"""Lets mkdocstrings know that `Example:` in a docstring begins a section of examples, as `Examples:` does."""

from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """For the parser of docstrings, which knows the plural only."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this for each function and class."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
