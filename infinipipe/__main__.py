"""Lets `python -m infinipipe` do what the `infinipipe` command does."""

from infinipipe.cli import main

main()
