"""Compares the vocabulary-parallel linear operators over two GPUs (NCCL) with one GPU that has the whole layer."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rl_kernel import linear_logp, linear_token_loss
from rl_kernel.ops.linear_logp.cases import LinearCase

pytestmark = pytest.mark.multi_gpu

CASE = LinearCase("split", 1000, 512, 50304, vocab_size=50257)
SPLIT = 30016
KINDS = ((torch.bfloat16, 1536 * 2**20), (torch.bfloat16, 40 * 2**20), (torch.float32, 1536 * 2**20))


def results(device, first, last, group):
    """Returns outputs and gradients of the two operators on the columns [first, last), by kind."""
    found = {}
    for dtype, workspace in KINDS:
        hidden, weight, targets = (x.to(device) for x in CASE.inputs(dtype))
        g, h = torch.randn(2, CASE.tokens, generator=torch.Generator().manual_seed(3)).to(device)
        shared = {
            "vocab_size": CASE.vocab_size,
            "vocab_start": first,
            "tp_group": group,
            "return_entropy": True,
        }
        shared |= {"workspace_bytes": workspace, "impl": "triton", "logits_dtype": "float32"}
        leaves = [x.clone().requires_grad_() for x in (hidden, weight[first:last])]
        log_probs, entropy = linear_logp(*leaves, targets, **shared)
        (log_probs * g + entropy * h).sum().backward()
        values = {
            "log_probs": log_probs,
            "entropy": entropy,
            "d_hidden": leaves[0].grad,
            "d_weight": leaves[1].grad,
        }
        leaves = [x.clone().requires_grad_() for x in (hidden, weight[first:last])]
        buffer = torch.zeros(leaves[1].shape, device=device)

        def loss(log_probs, entropy, rows, g=g, h=h):
            return (log_probs * g[rows] + entropy * h[rows]).sum(), {"seen": log_probs}

        one = linear_token_loss(*leaves, targets, loss, weight_grad=buffer, **shared)
        one.loss.backward()
        values |= {"one log_probs": one.log_probs, "one d_hidden": leaves[0].grad, "one d_weight": buffer}
        values |= {"seen": one.metrics["seen"]}
        found[dtype, workspace] = {name: value.detach().cpu() for name, value in values.items()}
    return found


def on_rank(rank, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    first, last = ((0, SPLIT), (SPLIT, CASE.vocab))[rank]
    torch.save(results(torch.device("cuda", rank), first, last, dist.group.WORLD), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_gpus_equal_one(tmp_path):
    mp.spawn(on_rank, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    whole = results(torch.device("cuda", 0), 0, CASE.vocab, None)
    for kind, want in whole.items():
        limit = 1e-5 if kind[0] == torch.float32 else 0.01
        for name, value in want.items():
            parts = [rank[kind][name] for rank in ranks]
            if name.endswith("d_weight"):
                got = torch.cat(parts)
            else:
                assert torch.equal(*parts), f"{name} differs between the ranks"
                got = parts[0]
            scale = value.abs().max()
            worst = (got.float() - value.float()).abs().max()
            assert worst <= (2e-5 if name in ("log_probs", "entropy") else limit * scale), (kind, name)
