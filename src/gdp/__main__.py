"""`python -m gdp` is `gdp`."""

import gc
import sys

_INTERRUPTED = 130  # as `gdp.cli.shared` has it


def main() -> int:
    """Runs the command line of this process and returns its exit status; Ctrl-C may come while it is imported."""
    gc.set_threshold(100_000, 50, 1000)  # else a sixth of a capture goes to looking at the objects of PyTorch
    try:
        from gdp.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("gdp: interrupted\n")
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
