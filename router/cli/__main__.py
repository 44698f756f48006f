"""The entry point of `lightkv`. Imports nothing of its own, so that it can tell which packages are missing."""

import sys

from lightkv.errors import MissingExtra


def main() -> None:
    """Run the command; without the packages that it needs, end with a line that says how to install them."""
    try:
        from .app import main as run
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("lightkv"):
            raise
        sys.exit(f"lightkv: {MissingExtra(error.name)}")
    run()


if __name__ == "__main__":
    main()
