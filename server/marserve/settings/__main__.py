"""`python -m marserve.settings config|docs`: prints the commented file, or the page `docs/settings.md`."""

from __future__ import annotations

import sys

from marserve.settings.document import write_config, write_page


def main(arguments: list[str]) -> int:
    """Print what was asked for; 2 for anything else."""
    if arguments == ["config"]:
        sys.stdout.write(write_config())
        return 0
    if arguments == ["docs"]:
        sys.stdout.write(write_page())
        return 0
    sys.stderr.write("usage: python -m marserve.settings config|docs\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
