"""Fails where a source file has outgrown one noun."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("cluster", "router", "replicas", "kernels")
MAX_LINES = 400


def main() -> int:
    too_long = 0
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MAX_LINES:
                too_long += 1
                print(f"{path.relative_to(ROOT)}: {lines} lines; {MAX_LINES} at the most")
    return min(too_long, 1)


if __name__ == "__main__":
    sys.exit(main())
