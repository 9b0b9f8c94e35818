"""`splitserve` and `python -m splitserve`: Ctrl-C is no traceback, not even while importing."""

from __future__ import annotations

import sys


def run() -> None:
    """Entry point of the console script."""
    try:
        from splitserve.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
