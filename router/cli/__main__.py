"""The entry point of `lightkv`. It imports the command line only when it runs, so that it can say which
packages are missing."""

import sys

from lightkv.errors import MissingExtra


def main() -> None:
    """Runs the command line. If packages are missing, exits with a line that says how to install them."""
    try:
        from .app import main as run
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("lightkv"):
            raise
        sys.exit(f"lightkv: {MissingExtra(error.name)}")
    run()


if __name__ == "__main__":
    main()
