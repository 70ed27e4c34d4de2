"""Initialisation of a DSpark drafter by ridge regression of the target's final hidden states on the features before the
anchor, the anchor's embedding and, through the sequential head, the token before each position."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from drafters.hidden_states.block_network import BlockNetwork
from drafters.hidden_states.config import BlockConfig
from drafters.hidden_states.heads import GatedMarkovHead, MarkovHead, RecurrentHead

_RIDGE = 0.1  # relative to the Gram matrix's diagonal, as inputs differ in size
_LINEAR = 0.25  # input size up to which tanh is nearly linear

# Of blocks: inputs [A, n], embeddings of the token before each position [A, gamma, d], values to predict [A, gamma, d].
Samples = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def regress(network: BlockNetwork, samples: Iterable[Samples], output_rows: Tensor) -> None:
    """Sets the anchor's input and the sequential head. ``output_rows``: the row of the head of each token, or -1."""
    moments = Moments(network.config)
    for x, embedded, wanted in samples:
        moments.add(x, embedded, wanted)
    assert moments.num, "no samples to regress on"
    maps, previous_map = moments.solve()
    _set_anchor_input(network, maps, moments)
    if network.markov_head is not None:
        _set_sequential(network, network.markov_head, previous_map, output_rows)


class Moments:
    """Second moments of the regression, in fp64 as the Gram matrix is ill-conditioned."""

    def __init__(self, config: BlockConfig) -> None:
        num_in, d, block = config.feature_size + config.shape.hidden_size + 1, config.shape.hidden_size, config.block_size
        self.xx = torch.zeros(num_in, num_in, dtype=torch.float64)
        self.xy, self.xe = torch.zeros(2, block, num_in, d, dtype=torch.float64)
        self.ee, self.ey = torch.zeros(2, block, d, d, dtype=torch.float64)
        self.num = 0

    def add(self, x: Tensor, embedded: Tensor, wanted: Tensor) -> None:
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=-1)
        self.num += len(x)
        self.xx += (x.T @ x).cpu()
        for k in range(embedded.shape[1]):
            y, e = wanted[:, k], embedded[:, k]
            self.xy[k] += (x.T @ y).cpu()
            self.xe[k] += (x.T @ e).cpu()
            if k:  # before the first position stands the anchor, which is in x
                self.ee[k] += (e.T @ e).cpu()
                self.ey[k] += (e.T @ y).cpu()

    def solve(self) -> tuple[Tensor, Tensor | None]:
        """Maps of x, [gamma, n + 1, d], and one map [d, d] of the previous token's embedding: joint least squares."""
        gram = self.xx + _RIDGE * self.xx.diagonal().diag()
        factor = torch.linalg.cholesky(gram)
        block, _, d = self.xy.shape
        sides = torch.cat([self.xy, self.xe]).permute(1, 0, 2).flatten(1)
        solved = torch.cholesky_solve(sides, factor).unflatten(1, (-1, d)).permute(1, 0, 2)
        maps, of_previous = solved[:block], solved[block:]
        if block == 1:
            return maps.float(), None
        left = sum(self.ee[k] - self.xe[k].T @ of_previous[k] for k in range(1, block))
        right = sum(self.ey[k] - self.xe[k].T @ maps[k] for k in range(1, block))
        left = left + _RIDGE * left.diagonal().diag()
        previous = torch.linalg.solve(left, right)
        return (maps - of_previous @ previous).float(), previous.float()

    def root(self) -> Tensor:
        """A square root of the second moments of x, fp32: it turns changes of the maps into changes of predictions. The
        smallest ridge that makes the matrix positive definite is added."""
        eye = self.xx.diagonal().mean() * torch.eye(len(self.xx), dtype=torch.float64)
        for ridge in (1e-6, 1e-5, 1e-4, 1e-3):
            factor, failed = torch.linalg.cholesky_ex(self.xx + ridge * eye)
            if not failed:
                return factor.T.float()
        return torch.linalg.cholesky(self.xx + _RIDGE * eye).T.float()


def _set_anchor_input(network: BlockNetwork, maps: Tensor, moments: Moments) -> None:
    """At full rank the maps themselves; else reduced-rank regression, closest in the predictions."""
    module, rank = network.anchor_input, network.config.anchor_input_rank
    assert module is not None
    flat = maps.permute(1, 0, 2).flatten(1)  # [n + 1, gamma d]
    weight, bias = flat[:-1], flat[-1]
    module.maps.bias.copy_(bias)
    if rank is None:
        module.maps.weight.copy_(weight.T)
        return
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _, _, vectors = torch.svd_lowrank(moments.root() @ flat, q=rank, niter=2)
    reduce = (weight @ vectors).T  # [rank, n]
    scale = reduce.norm(dim=1, keepdim=True).clamp_min(1e-6)  # unit rows suit the optimiser
    module.reduce.get_parameter("weight").copy_(reduce / scale)
    module.maps.weight.copy_(vectors * scale.T)


def _set_sequential(network: BlockNetwork, head: MarkovHead, previous_map: Tensor | None, output_rows: Tensor) -> None:
    """B(x, .) = head (w * (E[x] A)) by its ``rank`` strongest directions; 0 without a map (blocks of one position)."""
    if previous_map is None:
        head.markov_w2.weight.zero_()
        return
    embedding = network.embed_tokens.weight
    through = previous_map * network.norm.weight  # the final norm's weights alone
    known = (output_rows >= 0).nonzero().squeeze(1)
    mapped = embedding[known] @ through
    _, _, right = torch.linalg.svd(mapped.T @ mapped)
    directions = right[: head.rank]  # [r, d]
    balance = (mapped @ directions.T).std() ** 0.5
    head.markov_w1.weight.zero_()
    head.markov_w1.weight[output_rows[known]] = mapped @ directions.T / balance
    head.markov_w2.weight.copy_(network.lm_head.weight @ directions.T * balance)
    if isinstance(head, GatedMarkovHead):  # half open everywhere, so that the bias is that of a Markov head
        nn.init.zeros_(head.gate_proj.weight)
        nn.init.zeros_(head.gate_proj.bias)
        head.markov_w2.weight.mul_(2.0)
    elif isinstance(head, RecurrentHead):
        _pass_through(head)


def _pass_through(head: RecurrentHead) -> None:
    """Makes the bias nearly that of a Markov head. The state averages the block's tokens and is not read yet. Each dimension
    of W_1 is scaled to size 1, so that it does not dominate int8 rounding of W_o's rows."""
    rank = head.rank
    size = head.markov_w1.weight.square().mean(0).sqrt().clamp_min(1e-6)
    head.markov_w1.weight.div_(size)
    head.markov_w2.weight.mul_(size / _LINEAR)
    nn.init.zeros_(head.joint_proj.weight)
    nn.init.zeros_(head.joint_proj.bias)
    _, candidate, output = head.joint_proj.weight[:, rank : 2 * rank].chunk(3)
    candidate.fill_diagonal_(1.0)
    output.fill_diagonal_(_LINEAR)
