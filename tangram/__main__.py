"""`python -m tangram` is the `tangram` command."""

from tangram.cli import main

main()
