"""Context parallelism in a plain torch model: packed rows split over several processes, compared with a dense mask.

torchrun --nproc-per-node 2 examples/own_model.py [--window 24] [--window-mask sliding] [--scheme ulysses]

`shared` is all the code that your own model needs, without Megatron or a configuration. `dense` is the same attention
in one process, with an explicit mask. The script prints the differences of outputs and gradients, and fails beyond
1e-5.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext.attention.shared_rows import share_rows

LENGTH, HIDDEN, HEADS, KEY_HEADS, HEAD_SIZE = 96, 32, 8, 4, 4
DOCUMENT_ENDS = [[6, 30, 38, 58], [1, 95]]  # of two rows; a document also ends at the end of its row


class Attention(nn.Module):
    """One layer's projections."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HEADS * HEAD_SIZE)
        self.key = nn.Linear(HIDDEN, KEY_HEADS * HEAD_SIZE)
        self.value = nn.Linear(HIDDEN, KEY_HEADS * HEAD_SIZE)
        self.out = nn.Linear(HEADS * HEAD_SIZE, HIDDEN)

    def heads(self, x_tD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [t, heads, head size] each."""
        query, key, value = (layer(x_tD).unflatten(1, (-1, HEAD_SIZE)) for layer in (self.query, self.key, self.value))
        return query, key, value


def shared(layer: Attention, x_TD: Tensor, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Compute attention on one rank of the default group; return its outputs [t, D] and its token indices."""
    rows = share_rows(
        LENGTH,
        DOCUMENT_ENDS,
        options.window,
        group=dist.group.WORLD,
        window_mask=options.window_mask,
        scheme=options.scheme,
    )
    query, key, value = layer.heads(x_TD[rows.tokens])
    return layer.out(rows.attend(query, key, value).flatten(1)), rows.tokens


def dense(layer: Attention, x_TD: Tensor, window: int | None, window_mask: str) -> Tensor:
    """Compute attention over all tokens in one process, with an explicit mask; [T, D]."""
    token = torch.arange(LENGTH)
    rows = []
    for x_LD, ends in zip(x_TD.split(LENGTH), DOCUMENT_ENDS, strict=True):
        document = torch.bucketize(token, torch.tensor(ends), right=True)
        sees = (token[:, None] >= token) & (document[:, None] == document)
        if window is not None:
            apart = token[:, None] - token
            sees &= {
                "grid": token[:, None] // window == token // window,
                "sliding": apart <= window,
                "sliding_w": apart < window,
            }[window_mask]
        heads = [x.transpose(0, 1)[None] for x in layer.heads(x_LD)]
        out = F.scaled_dot_product_attention(*heads, attn_mask=sees, enable_gqa=True)
        rows.append(layer.out(out[0].transpose(0, 1).flatten(1)))
    return torch.cat(rows)


def gradients(layer: Attention) -> Tensor:
    """Return the gradients of all parameters, concatenated, and clear them."""
    taken = torch.cat([parameter.grad.flatten() for parameter in layer.parameters() if parameter.grad is not None])
    layer.zero_grad()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, help="w, bound on attention in tokens")
    parser.add_argument("--window-mask", choices=("grid", "sliding", "sliding_w"), default="grid")
    parser.add_argument("--scheme", choices=("exchange", "ulysses"), default="exchange")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights and tokens on every rank
    layer, x_TD = Attention(), torch.randn(LENGTH * len(DOCUMENT_ENDS), HIDDEN)

    out_tD, tokens = shared(layer, x_TD, options)
    out_tD.square().sum().backward()
    mine = gradients(layer)
    dist.all_reduce(mine)  # as in any data-parallel model: each rank has its own tokens' share of the sum

    whole_TD = dense(layer, x_TD, options.window, options.window_mask)
    whole_TD.square().sum().backward()
    expected = gradients(layer)

    apart = [(out_tD - whole_TD[tokens]).abs().max() / whole_TD.abs().max()]
    apart.append((mine - expected).abs().max() / expected.abs().max())
    worst = torch.stack([distance.detach() for distance in apart])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks against one: outputs {worst[0]:.1e}, gradients {worst[1]:.1e} apart")
    dist.destroy_process_group()
    if worst.max() > 1e-5:
        raise SystemExit("more than rounding apart")


if __name__ == "__main__":
    main()
