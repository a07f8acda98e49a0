"""vLLM's own client that measures a server: `python -m eval.vllm_plugin.bench --help`. It is `vllm bench serve`, whose command does not
start from the CPU wheel."""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    args = parser.parse_args()
    assert args is not None
    main(args)
