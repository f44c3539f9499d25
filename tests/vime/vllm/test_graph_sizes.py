"""The numbers of tokens for which an engine on a GPU captures CUDA graphs."""

from __future__ import annotations

import pytest

from vime.vllm.server import GRAPH_TOKENS, VllmServer, VllmSpec
from vime.vllm.server_flags import vllm_parser


def parsed(*flags: str, device: str = "cuda", bitwise: tuple[str, ...] = ()):
    """Parses an engine's command with vLLM's own parser."""
    paths = {"model_path": "m", "run_key": "k", "log_path": "l", "weight_dir": "/w"}
    server = VllmServer(VllmSpec(**paths, device=device, bitwise=bitwise, vllm_argv=flags))
    return vllm_parser().parse_args(server.command()[4:])


@pytest.mark.parametrize("bitwise", [(), ("head",)])
@pytest.mark.parametrize("flags", [(), ("--max-num-seqs", "512"), ("--max-num-seqs=256", "--seed", "3")])
def test_512_requests_and_their_prompts_are_a_graph(flags: tuple[str, ...], bitwise: tuple[str, ...]) -> None:
    options = parsed(*flags, bitwise=bitwise)
    assert tuple(options.cudagraph_capture_sizes) == GRAPH_TOKENS
    assert [n for n in GRAPH_TOKENS if n > 512] == [640, 768, 1024, 1280, 1536, 2048]
    assert options.compilation_config.mode == (0 if bitwise else None)


@pytest.mark.parametrize("bitwise", [(), ("head",)])
@pytest.mark.parametrize(
    "flags",
    [
        ("--max-cudagraph-capture-size", "64"),
        ("--max-cudagraph-capture-size=64",),
        ("--cudagraph-capture-sizes", "1", "64"),
    ],
)
def test_a_user_who_chooses_sizes_chooses_all_sizes(flags: tuple[str, ...], bitwise: tuple[str, ...]) -> None:
    """vLLM does not start if one flag gives sizes and another flag gives the largest size."""
    options = parsed(*flags, bitwise=bitwise)
    assert (options.max_cudagraph_capture_size, options.cudagraph_capture_sizes) in [
        (64, None),
        (None, [1, 64]),
    ]


@pytest.mark.parametrize(
    "flags",
    [
        ("--compilation-config", '{"cudagraph_capture_sizes": [1, 64]}'),
        ("--compilation-config.cudagraph_capture_sizes", "[1, 64]"),
        ("--compilation-config.cudagraph_capture_sizes=[1, 64]",),
    ],
)
def test_sizes_in_a_compilation_config_are_the_only_sizes(flags: tuple[str, ...]) -> None:
    """vLLM does not start if both --compilation-config and --cudagraph-capture-sizes give sizes."""
    options = parsed(*flags)
    assert options.compilation_config.cudagraph_capture_sizes == [1, 64]
    assert options.cudagraph_capture_sizes is None


@pytest.mark.parametrize(
    ("device", "flags"),
    [
        ("cuda", ("--max-num-seqs", "8")),
        ("cuda", ("--enforce-eager",)),
        ("cpu", ()),
        ("cuda", ("--max-num-seqs=255",)),
    ],
)
def test_engines_with_few_requests_or_without_graphs_capture_no_more_than_by_default(
    device: str, flags: tuple[str, ...]
) -> None:
    assert parsed(*flags, device=device).cudagraph_capture_sizes is None


def test_a_bitwise_engine_with_few_requests_has_graphs_of_long_steps() -> None:
    """Without torch.compile, each step without a graph takes long."""
    assert parsed("--max-num-seqs", "8", bitwise=("head",)).cudagraph_capture_sizes[-1] == 2048
