"""``python -m edit.monitor RUN_DIR``: the summary of a run in the terminal, and a PNG page of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from .log import read
from .page import draw, summary


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m edit.monitor", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="where edit.monitor.JsonLines wrote")
    parser.add_argument("--png", type=Path, help="where the page goes (default: RUN_DIR/rounds.png)")
    options = parser.parse_args()
    try:
        log = read(options.run_dir)
    except (FileNotFoundError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    name = options.run_dir.resolve().name
    print(summary(log, name), end="")
    path = options.png or options.run_dir / "rounds.png"
    try:
        draw(log, path, name)
    except ImportError:
        print("no picture: it needs matplotlib (pip install matplotlib)")
    else:
        print(f"page: {path}")


if __name__ == "__main__":
    main()
