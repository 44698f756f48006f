"""How one of router/'s processes is started: the command line, which is the same for all. Knows no process."""

import os
import sys


def command(module: str, *args: str) -> list[str]:
    """What runs a module of router/ in this interpreter. `-m` alone would import from the working directory
    before all else: only where this process does so too."""
    safe_path = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    return [sys.executable, *safe_path, "-m", f"lightkv.router.{module}", *args]
