"""`python -m compress` and the `compress` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits with its code."""
    from compress.cli.app import start

    sys.exit(start(sys.argv[1:]))


if __name__ == "__main__":
    main()
