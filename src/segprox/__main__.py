"""`python -m segprox` is `segprox`."""

from segprox.cli import main

main()
