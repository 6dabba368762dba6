"""Print the oldest version of each dependency that pyproject.toml allows, as constraints for pip."""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def minimal_versions(text: str) -> list[str]:
    """`numpy==2` for `numpy>=2`, for each dependency of the core."""
    found = (re.fullmatch(r"([\w.-]+)>=([\w.]+)", entry) for entry in tomllib.loads(text)["project"]["dependencies"])
    return [f"{entry[1]}=={entry[2]}" for entry in found if entry]


if __name__ == "__main__":
    print("\n".join(minimal_versions(PROJECT.read_text())))
