"""``python -m services.policy [--role train|eval]``: become vLLM, started as the recipe says."""

from __future__ import annotations

import argparse

from services.common.errors import run_main
from services.policy.app import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="services.policy", description=__doc__)
    parser.add_argument(
        "--role", choices=("train", "eval"), default="train",
        help="train: weights follow the trainer; eval: pristine base, adapters loaded at run time",
    )  # fmt: skip
    return serve(parser.parse_args().role)


if __name__ == "__main__":
    run_main(main)
