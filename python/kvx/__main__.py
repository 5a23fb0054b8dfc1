"""``python -m kvx``: the command line tool, which lies beside this file."""

import os
import sys
from pathlib import Path


def main() -> None:
    tool = Path(__file__).parent / "bin" / "kvx"
    if not tool.exists():
        sys.exit(f"kvx: the command line tool is not at {tool}; install the kvx wheel again")
    os.execv(tool, [str(tool), *sys.argv[1:]])


if __name__ == "__main__":
    main()
