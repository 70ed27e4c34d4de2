"""Distillation of a DSpark drafter: what a batch costs it, and where it begins."""

import copy
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from drafters.dspark.checkpoint import TargetRows, load_network, new_network, save_network
from drafters.dspark.config import DSparkConfig
from drafters.dspark.heads import GatedMarkovHead, MarkovHead, RecurrentHead
from drafters.dspark.network import DSparkNetwork
from drafters.training.batches import Batch
from drafters.training.frozen import FrozenTarget
from drafters.training.hidden_states import Rows
from drafters.training.losses import Losses, TargetDistribution, distillation, position_weights
from drafters.training.normalization import fold, unfold
from drafters.training.recipe import STORED
from drafters.training.target_layers import read_final_norm, read_layers
from drafters.training.vocabulary import positions_in

_RIDGE = 0.1  # of the Gram matrix's own diagonal: inputs are of very different sizes
_LINEAR = 0.25  # of inputs of size 1, tanh makes so little else than they are


class DSparkStudent(nn.Module):
    """The network over features that are standardised per dimension; the standardisation is folded into it when it is saved.

    Args:
        rows: the target's.
        mean, std: of the features, fp32 [feature_size].
    """

    mean: Tensor
    std: Tensor
    places: Tensor
    weights: Tensor

    def __init__(self, config: DSparkConfig, rows: Rows, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.config = config
        self.network = new_network(config, TargetRows(rows.embedding, rows.head)).train()
        vocabulary = None if config.draft_token_ids is None else torch.tensor(config.draft_token_ids)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        self.register_buffer("places", positions_in(vocabulary, config.shape.vocab_size), persistent=False)
        self.register_buffer("weights", position_weights(config.block_size), persistent=False)

    def standardised(self, features: Tensor) -> Tensor:
        return (features.float() - self.mean) / self.std

    def forward(self, batch: Batch, progress: float) -> Losses:
        """Losses of all blocks of a batch; ``acceptance`` is [A, batch.block_len], NaN where a sequence had ended."""
        block = batch.block_len
        steps = torch.arange(block, device=batch.anchors.device)
        rows = batch.anchors[:, None] + steps  # of which the target's next token is wanted
        has_truth = rows + 1 < batch.ends[:, None]
        last = len(batch.token_ids) - 1
        known = rows.clamp_max(last)
        hidden = self.network(self.standardised(batch.features), batch.token_ids, batch.lens, batch.anchors, block)
        previous = batch.token_ids[known]
        latents = self.network.latents(hidden, previous)
        confidence = self.network.confidence_logits(hidden, previous) if self.config.has_confidence else None
        wanted = known[has_truth]
        losses = distillation(
            self.network.logits(hidden[has_truth], None if latents is None else latents[has_truth]),
            TargetDistribution.at(batch.features, batch.normalisers, wanted, self.network.lm_head.weight),
            self.places[batch.token_ids[(wanted + 1).clamp_max(last)]],
            self.weights[:block].expand_as(rows)[has_truth],
            progress,
            None if confidence is None else confidence[has_truth],
        )
        acceptance = torch.full(rows.shape, torch.nan, device=rows.device)
        acceptance[has_truth] = losses.acceptance
        return replace(losses, acceptance=acceptance)

    @torch.no_grad()
    def initialise(self, batches: Iterable[Batch], target: FrozenTarget) -> None:
        """Begin as the best linear predictor of the target's final hidden states.

        The layers are copies of the target's that add nothing at first (zero output projections). Ridge regression on the
        features before the anchor, the anchor and, through the sequential head, the token before each position.
        """
        network = self.network
        assert network.anchor_input is not None
        _copy_layers(network, target)
        network.norm.weight.copy_(read_final_norm(target.folder))
        moments = _Moments(self.config)
        sample: Batch | None = None
        for batch in batches:
            sample = batch
            moments.add(*self._regression(batch))
        assert sample is not None, "nothing to begin from"
        maps, previous_map = moments.solve()
        _set_anchor_input(network, maps, moments)
        if network.markov_head is not None:
            _set_sequential(network, network.markov_head, previous_map, self.places)
        network.norm.weight.mul_(self._shrinkage(sample))

    @torch.no_grad()
    def begin_with(self, folder: Path, rows: Rows) -> None:
        """Begin as a saved drafter of the same configuration.

        Raises:
            ModelUnavailable: half-written.
        """
        network = load_network(folder, TargetRows(rows.embedding, rows.head))
        self.network.load_state_dict(network.state_dict())
        unfold(self.network, self.mean, self.std)

    def _shrinkage(self, batch: Batch) -> float:
        """How large the predictions are, over the states that they predict: the final norm brings all to full size, as if
        nothing were uncertain."""
        features = self.standardised(batch.features)
        x = self.network._block_inputs(
            features, batch.token_ids, batch.anchors, _has_context(batch, batch.anchors), self.config.block_size
        )
        return float(x.square().mean(-1).sqrt().mean())

    def _regression(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Of blocks that are whole: inputs [A, n] (the features before the anchor, 0 where nothing stands there; its
        embedding), embeddings of the tokens
        before each position [A, gamma, d], hidden states to predict (before the final norm's weights, so of size 1) less
        what the network adds by itself [A, gamma, d]."""
        block = self.config.block_size
        network = self.network
        anchors = batch.anchors[batch.anchors + block < batch.ends]
        rows = anchors[:, None] + torch.arange(block, device=anchors.device)
        hidden_size = self.config.shape.hidden_size
        wanted = batch.features[rows, -hidden_size:].float() / network.norm.weight
        embedded = network.embed_tokens(batch.token_ids[rows])
        own = network.embed_tokens.weight[self.config.mask_token_id].expand_as(embedded).clone()
        own[:, 0] = embedded[:, 0]
        before = self.standardised(batch.features[(anchors - 1).clamp_min(0)]) * _has_context(batch, anchors)[:, None]
        return torch.cat([before, embedded[:, 0]], dim=-1), embedded, wanted - own

    def save(self, folder: Path, target_folder: Path) -> None:
        network = copy.deepcopy(self.network)
        fold(network, self.mean, self.std)
        save_network(network, folder, json.loads((target_folder / "config.json").read_text()), STORED)


class _Moments:
    """Second moments of the regression; everything is solved from them. fp64, for the Gram matrix is ill-conditioned."""

    def __init__(self, config: DSparkConfig) -> None:
        num_in, d, block = config.feature_size + config.shape.hidden_size + 1, config.shape.hidden_size, config.block_size
        self.xx = torch.zeros(num_in, num_in, dtype=torch.float64)
        self.xy = torch.zeros(block, num_in, d, dtype=torch.float64)
        self.xe = torch.zeros(block, num_in, d, dtype=torch.float64)
        self.ee = torch.zeros(block, d, d, dtype=torch.float64)
        self.ey = torch.zeros(block, d, d, dtype=torch.float64)
        self.num = 0

    def add(self, x: Tensor, embedded: Tensor, wanted: Tensor) -> None:
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=-1)
        self.num += len(x)
        self.xx += (x.T @ x).cpu()
        for k in range(embedded.shape[1]):
            y, e = wanted[:, k], embedded[:, k]
            self.xy[k] += (x.T @ y).cpu()
            self.xe[k] += (x.T @ e).cpu()
            if k:  # at the first position the token before is the anchor, which is in x
                self.ee[k] += (e.T @ e).cpu()
                self.ey[k] += (e.T @ y).cpu()

    def solve(self) -> tuple[Tensor, Tensor | None]:
        """Maps [gamma, n + 1, d] of x, one per position, and one of the previous token's embedding [d, d] for all of them:
        least squares in both together, x eliminated first."""
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

    def spread(self) -> Tensor:
        """A square root of the second moments of x, fp32: what a change of the maps changes in the predictions.

        Of few positions the matrix is singular, and rounding in the products of a batch leaves eigenvalues below 0: the
        least ridge is taken with which it is positive definite.
        """
        eye = self.xx.diagonal().mean() * torch.eye(len(self.xx), dtype=torch.float64)
        for ridge in (1e-6, 1e-5, 1e-4, 1e-3):
            factor, failed = torch.linalg.cholesky_ex(self.xx + ridge * eye)
            if not failed:
                return factor.T.float()
        return torch.linalg.cholesky(self.xx + _RIDGE * eye).T.float()


def _set_anchor_input(network: DSparkNetwork, maps: Tensor, moments: _Moments) -> None:
    """Of full rank as it is; else the nearest of lower rank in what it predicts (reduced-rank regression)."""
    assert network.anchor_input is not None
    flat = maps.permute(1, 0, 2).flatten(1)  # [n + 1, gamma d]
    weight, bias = flat[:-1], flat[-1]
    rank = network.config.anchor_input_rank
    module = network.anchor_input
    assert module is not None
    module.maps.bias.copy_(bias)
    if rank is None:
        module.maps.weight.copy_(weight.T)
        return
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _, _, vectors = torch.svd_lowrank(moments.spread() @ flat, q=rank, niter=2)
    reduce = (weight @ vectors).T  # [rank, n]
    scale = reduce.norm(dim=1, keepdim=True).clamp_min(1e-6)  # rows of unit length suit the optimiser
    module.reduce.get_parameter("weight").copy_(reduce / scale)
    module.maps.weight.copy_(vectors * scale.T)


def _set_sequential(network: DSparkNetwork, head: MarkovHead, previous_map: Tensor | None, places: Tensor) -> None:
    """B(x, .) = head (w * (E[x] A)) by its ``rank`` strongest directions, for any head. Tokens outside the vocabulary have
    none. No map, for blocks of one position: B begins at 0."""
    if previous_map is None:
        head.markov_w2.weight.zero_()
        return
    embedding = network.embed_tokens.weight
    through = previous_map * network.norm.weight  # as if the final norm let it pass
    known = (places >= 0).nonzero().squeeze(1)
    mapped = embedding[known] @ through
    _, _, right = torch.linalg.svd(mapped.T @ mapped)
    directions = right[: head.rank]  # [r, d]
    balance = (mapped @ directions.T).std() ** 0.5
    head.markov_w1.weight.zero_()
    head.markov_w1.weight[places[known]] = mapped @ directions.T / balance
    head.markov_w2.weight.copy_(network.lm_head.weight @ directions.T * balance)
    if isinstance(head, GatedMarkovHead):
        _open_gate(head)
    elif isinstance(head, RecurrentHead):
        _pass_through(head)


def _open_gate(head: GatedMarkovHead) -> None:
    """Half open at every position: the bias is what it is without a gate."""
    nn.init.zeros_(head.gate_proj.weight)
    nn.init.zeros_(head.gate_proj.bias)
    head.markov_w2.weight.mul_(2.0)


def _pass_through(head: RecurrentHead) -> None:
    """The bias is nearly what it is without a state, which remembers the tokens of the block, each half as well as the next,
    and is not read yet. W_1 is brought to size 1 in every dimension, so that its part of W_o does not drown in int8 what the
    rest of a row learns."""
    rank = head.rank
    size = head.markov_w1.weight.square().mean(0).sqrt().clamp_min(1e-6)
    head.markov_w1.weight.div_(size)
    head.markov_w2.weight.mul_(size / _LINEAR)
    nn.init.zeros_(head.joint_proj.weight)
    nn.init.zeros_(head.joint_proj.bias)
    _, candidate, output = head.joint_proj.weight[:, rank : 2 * rank].chunk(3)
    candidate.fill_diagonal_(1.0)
    output.fill_diagonal_(_LINEAR)


def _has_context(batch: Batch, anchors: Tensor) -> Tensor:
    """Whether anything stands before each anchor in its sequence, bool [A]."""
    starts = torch.tensor([0, *batch.lens[:-1]], device=anchors.device).cumsum(0)
    return ~torch.isin(anchors, starts)


def _copy_layers(network: DSparkNetwork, target: FrozenTarget) -> None:
    """The target's last layers, silenced: what they add begins at zero."""
    num_target, num_own = target.model.config.num_layers, len(network.layers)
    for layer, weights in zip(
        network.layers, read_layers(target.folder, range(num_target - num_own, num_target)), strict=True
    ):
        layer.load_state_dict(weights, strict=False)
        nn.init.zeros_(layer.get_submodule("self_attn.o_proj").get_parameter("weight"))
        nn.init.zeros_(layer.get_submodule("mlp.down_proj").get_parameter("weight"))
