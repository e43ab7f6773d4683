"""Runs the command line: `python -m cairn`."""

from ._command import main

main()
