"""``python -m kvx.lmdeploy``: LMDeploy's program, whose PyTorch engine stores by kvx."""

import argparse
import sys

from lmdeploy.cli import run

from kvx.errors import Error
from kvx.lmdeploy import enable
from kvx.turbomind import KV_CACHE_FORMATS


def main(arguments: list[str]) -> None:
    """Takes kvx's options and gives LMDeploy's program the rest."""
    parser = argparse.ArgumentParser(
        prog="python -m kvx.lmdeploy",
        description="Runs LMDeploy with kvx's formats in its PyTorch engine. Without --recipe the "
        "engine's --quant-policy is TurboMind's: 4 int4, 8 int8, 16 FP4.",
        usage="%(prog)s [--recipe R | --kv-cache-format F] serve api_server MODEL "
        "--backend pytorch",
    )
    parser.add_argument("--recipe", help="how keys and values are stored: nvfp4, int8/int4")
    parser.add_argument(
        "--kv-cache-format",
        default="auto",
        choices=KV_CACHE_FORMATS,
        help="auto follows --quant-policy; int and fp4 insist on it",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what follows `lmdeploy`")
    chosen = parser.parse_args(arguments)
    if not chosen.command:
        parser.error("expected one of LMDeploy's commands, such as serve api_server MODEL")
    try:
        enable(chosen.recipe, kv_cache_format=chosen.kv_cache_format)
        sys.argv = ["lmdeploy", *chosen.command]
        run()
    except Error as error:
        parser.exit(1, f"python -m kvx.lmdeploy: {error}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
