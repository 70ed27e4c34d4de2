"""Training of a block drafter, DSpark or DFlash: its initialisation by ridge regression of the target's final hidden states
on the features before the anchor, the anchor's embedding and, through the sequential head, the token before each position;
and its storage."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from drafters.hidden_states.block_network import AnchorInput, BlockNetwork
from drafters.hidden_states.checkpoint import load_network, save_network, save_speculators
from drafters.hidden_states.config import BlockConfig
from drafters.hidden_states.heads import GatedMarkovHead, MarkovHead, RecurrentHead
from engine.models.int8 import quantise
from training.batches import AnswerBatch
from training.hidden_state_student import HiddenStateStudent, Positions
from training.recipe import STORED

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


class BlockStudent(HiddenStateStudent):
    """Of DSpark and DFlash."""

    config: BlockConfig
    network: BlockNetwork

    def positions(self, batch: AnswerBatch, previous: Tensor) -> Positions:
        features = self.standardised(batch.features)
        hidden = self.network(features, batch.token_ids, batch.lens, batch.anchors, batch.block_len)
        confidence = self.network.confidence_logits(hidden, previous) if self.config.has_confidence else None
        return Positions(hidden, self.network.latents(hidden, previous), confidence)

    def logits(self, hidden: Tensor, latents: Tensor | None) -> Tensor:
        return self.network.logits(hidden, latents)

    @torch.no_grad()
    def initialise(self, batches: Iterable[AnswerBatch]) -> None:
        """Starts as the best linear predictor of the target's final hidden states, with layers that add nothing yet. In the
        speculators format features are read by its layers alone: they start as the target's last ones."""
        network = self.network
        num_target = self._target.model.config.num_layers
        self._target.copy_layers(network.layers, range(num_target - len(network.layers), num_target), network.norm)
        if network.anchor_input is None:
            self.regress_features(batches)
            return
        for layer in network.layers:
            nn.init.zeros_(layer.get_submodule("self_attn.o_proj").get_parameter("weight"))
            nn.init.zeros_(layer.get_submodule("mlp.down_proj").get_parameter("weight"))
        last: list[AnswerBatch] = []

        def samples() -> Iterable[Samples]:
            for batch in batches:
                last[:] = [batch]
                yield self._samples(batch)

        regress(network, samples(), self.output_rows)
        network.norm.weight.mul_(self._prediction_size(last[0]))

    @torch.no_grad()
    def begin_with(self, folder: Path) -> None:
        """Starts as a saved drafter of the same configuration. Raises ModelUnavailable."""
        self.network.load_state_dict(load_network(folder, self._target.rows).state_dict())
        self._unfold()

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        network = copy.deepcopy(self.network)
        shape = json.loads((self._target.folder / "config.json").read_text())
        if network.anchor_input is None:
            network.fc.weight.div_(self.std)
            save_speculators(network, folder, shape | {"attention_bias": False}, self._target.info.name)
            return
        self._folded(network)
        save_network(network, folder, shape, STORED)

    def _prediction_size(self, batch: AnswerBatch) -> float:
        """Mean size of the predictions relative to the states: the final norm would scale all of them to full size."""
        features = self.standardised(batch.features)
        has_context = _has_context(batch, batch.anchors)
        x = self.network.block_inputs(features, batch.token_ids, batch.anchors, has_context, self.config.block_size)
        return float(x.square().mean(-1).sqrt().mean())

    def _samples(self, batch: AnswerBatch) -> Samples:
        """Regression samples of whole blocks: from the features before the anchor (or 0) and its embedding to the hidden
        states before the final norm's weights, less the network's own inputs."""
        block = self.config.block_size
        network = self.network
        anchors = batch.anchors[batch.anchors + block < batch.ends]
        rows = anchors[:, None] + torch.arange(block, device=anchors.device)
        wanted = batch.features[rows, -self.config.shape.hidden_size :].float() / network.norm.weight
        embedded = network.embed_tokens(batch.token_ids[rows])
        own = network.embed_tokens.weight[self.config.mask_token_id].expand_as(embedded).clone()
        own[:, 0] = embedded[:, 0]
        before = self.standardised(batch.features[(anchors - 1).clamp_min(0)]) * _has_context(batch, anchors)[:, None]
        return torch.cat([before, embedded[:, 0]], dim=-1), embedded, wanted - own

    def _folded(self, network: BlockNetwork) -> None:
        """Makes it a network over raw features, in place. Weights are rounded as stored before the means are taken out, as
        some means are large and would turn rounding into an error of the bias."""
        fc, anchor_input = network.fc, network.anchor_input
        fc.weight.copy_(quantise(fc.weight / self.std, uneven=True).dequantised())
        fc.bias.sub_(fc.weight @ self.mean)
        if anchor_input is not None:
            first = _feature_map(anchor_input)
            first.weight[:, : len(self.std)] /= self.std
            first.weight.copy_(quantise(first.weight, uneven=True).dequantised())
            anchor_input.maps.bias.sub_(self._mean_input(anchor_input))

    def _unfold(self) -> None:
        """The inverse of ``_folded`` for a loaded, hence rounded, network, with this run's standardisation."""
        fc, anchor_input = self.network.fc, self.network.anchor_input
        fc.bias.add_(fc.weight @ self.mean)
        fc.weight *= self.std
        if anchor_input is not None:
            anchor_input.maps.bias.add_(self._mean_input(anchor_input))
            _feature_map(anchor_input).weight[:, : len(self.std)] *= self.std

    def _mean_input(self, anchor_input: AnchorInput) -> Tensor:
        """What the features' means add to the block's inputs, with maps over raw features."""
        first = _feature_map(anchor_input)
        shift = first.weight[:, : len(self.mean)] @ self.mean
        return shift if first is anchor_input.maps else quantise(anchor_input.maps.weight).dequantised() @ shift


def _feature_map(anchor_input: AnchorInput) -> nn.Linear:
    """The matrix whose first columns read the features."""
    return anchor_input.reduce if isinstance(anchor_input.reduce, nn.Linear) else anchor_input.maps


def _has_context(batch: AnswerBatch, anchors: Tensor) -> Tensor:
    """Whether a token stands before each anchor in its sequence, bool [A]."""
    starts = torch.tensor([0, *batch.lens[:-1]], device=anchors.device).cumsum(0)
    return ~torch.isin(anchors, starts)
