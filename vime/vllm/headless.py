"""`python -m vime.vllm.headless FLAGS`: runs the server process of an engine on its second and further nodes.

It accepts the flags of vLLM's server. vLLM's server module always serves HTTP. `vllm serve --headless` runs workers
only, but its command line requires a distribution with the name "vllm", which the CPU build does not have. So this file
calls the function behind `--headless`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence


def main(argv: Sequence[str]) -> int:
    """Runs this node's workers until the first of them ends."""
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vime.vllm.versions import make_arg_parser

    make_parser: Callable[[], FlexibleArgumentParser] = FlexibleArgumentParser
    args = make_arg_parser(make_parser()).parse_args(list(argv))
    args.api_server_count = 0
    run_headless(args)
    return 1  # the workers run until the engine ends


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
