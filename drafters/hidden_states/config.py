"""Shapes of drafters that read hidden states, whatever layout of files they come from (``formats.py``)."""

from dataclasses import dataclass
from typing import Literal

from cluster.config import HiddenStateKind
from drafters.hidden_states.features import FeatureShape
from engine.models.config import DecoderConfig

MarkovKind = Literal["vanilla", "gated", "rnn"]
MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """What all kinds have. ``target_layer_ids`` select the target's hidden states that are its features, in this order: -1
    is the embedding, i is transformers' ``hidden_states[i + 1]``, so the last layer's is taken after the final norm."""

    kind: HiddenStateKind
    shape: DecoderConfig  # of its own layers; the vocabulary is the target's
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    num_target_layers: int | None = None  # None: unknown
    draft_token_ids: tuple[int, ...] | None = None  # of the head's rows, ascending; None: the whole vocabulary
    windows: tuple[int | None, ...] = ()  # of each layer: context rows that it attends to; None: all
    tokenizer_fingerprint: str | None = None  # None: unknown

    @property
    def features(self) -> FeatureShape:
        return FeatureShape(self.target_layer_ids, self.target_hidden_size)

    @property
    def feature_size(self) -> int:
        return self.features.width

    @property
    def num_outputs(self) -> int:
        """Rows of the head: tokens that can be drafted."""
        return self.shape.vocab_size if self.draft_token_ids is None else len(self.draft_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(NetworkConfig):
    """DSpark, and DFlash, which has no sequential head. Fields after the first line are of drafters that `outrider train`
    made."""

    block_size: int  # gamma: the anchor and block_size - 1 masks
    mask_token_id: int
    anchor_predicts: bool = True
    causal: tuple[bool, ...] = ()  # of each layer, within the block
    markov_rank: int = 0  # r; 0: no sequential head
    markov_kind: MarkovKind = "vanilla"
    reads_whole_vocabulary: bool = False  # W_1 has a row for each token of the target, also with a reduced head
    has_confidence: bool = False
    confidence_with_markov: bool = False

    shares_embedding: bool = False  # embedding and head are the target's rows, and are not stored
    fc_bias: bool = False  # of the features' projection; it absorbs their standardisation
    anchor_input: bool = False  # ``block_network.AnchorInput``
    anchor_input_rank: int | None = None  # None: full rank

    @property
    def num_skipped(self) -> int:
        """Positions at a block's begin that predict nothing."""
        return 0 if self.anchor_predicts else 1

    @property
    def draft_len(self) -> int:
        return self.block_size - self.num_skipped

    @property
    def attention(self) -> tuple[tuple[int | None, bool], ...]:
        """Window and causality of each layer."""
        none = (None,) * self.shape.num_layers
        return tuple(zip(self.windows or none, self.causal or (False,) * self.shape.num_layers, strict=True))

    @property
    def has_outside_row(self) -> bool:
        """Whether the last row of W_1 is for all tokens outside the reduced vocabulary, which may be anchors."""
        return self.draft_token_ids is not None and not self.reads_whole_vocabulary

    @property
    def num_markov_rows(self) -> int:
        return self.shape.vocab_size if self.reads_whole_vocabulary else self.num_outputs + self.has_outside_row


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(NetworkConfig):
    """EAGLE-3 (arXiv 2503.01840), and P-EAGLE, which drafts all tokens in one pass over masks."""

    draft_len: int  # tokens that it was trained to draft
    mask_token_id: int | None = None  # of P-EAGLE
    norm_before_residual: bool = False  # the first layer's residual is the normed feature
    norm_before_fc: bool = False  # one norm over the concatenated features
    fc_norm: bool = False  # one norm for each layer's features
    norm_output: bool = False  # the state that is fed back is the one after the final norm

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        return self.windows or (None,) * self.shape.num_layers
