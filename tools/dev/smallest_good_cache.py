"""Prints the cache with the fewest bytes a token among those that cost little perplexity.

usage: smallest_good_cache.py FIGURES.json    (what `kvx compare --json` writes)
"""

import json
import sys

LIMIT_PERCENT = 2.0


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        caches = json.load(file)["caches"]
    good = [c for c in caches if c["change_percent"]["value"] < LIMIT_PERCENT]
    if not good:
        sys.exit(f"no cache stays under {LIMIT_PERCENT} % of perplexity")
    print(min(good, key=lambda c: c["bytes_per_token"])["name"])


main()
