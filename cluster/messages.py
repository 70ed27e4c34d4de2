"""The messages on links: one per round and direction (DESIGN, the data plane).

The wire format is protobuf (``cluster/transport/wire.proto``), translated in ``cluster/transport/codec.py``.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.records import record
from cluster.types import Commit, Proposal, Request, SamplingParams

PROTOCOL_VERSION = 2


class Role(StrEnum):
    TARGET = "target"
    DRAFTER = "drafter"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Hello:
    """Identifies one end of a link. A mismatch of version, tokenizer or secret refuses the link with a reason.

    ``token`` is the cluster's shared secret. ``cluster/transport/handshake.py`` proves its knowledge without sending it; the
    ``Hello`` of a peer has none.
    """

    role: Role
    name: str
    vocab_size: int
    tokenizer_fingerprint: str
    token: str = field(default="", repr=False, compare=False)
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Open:
    """Opens a session: a request to follow, with all its committed tokens. Also the answer to a resync."""

    request_id: str
    token_ids: tuple[int, ...]  # prompt, then committed output
    prompt_len: int
    sampling: SamplingParams
    proposers: tuple[str, ...] = ()  # that ride ahead of the drafter for this request, smallest first


@record
class Extend:
    """Newly committed tokens of a followed request: positions base_len .. base_len + len(token_ids)."""

    request_id: str
    base_len: int
    token_ids: tuple[int, ...]


@record
class Budget:
    """What the drafter may spend on each proposal for a request. No tokens: it keeps in step, and does not draft."""

    request_id: str
    num_tokens: int
    row_price: float = 0.0  # in tokens: a draft token that is less likely to survive will not be verified


@record
class DraftRound:
    """Target to drafter, once a round.

    A drafter asks for a resync where an Extend does not start at the length that it knows, or the request is unknown.
    ``budgets`` holds changes only.
    """

    table_version: int
    opens: tuple[Open, ...] = ()
    extends: tuple[Extend, ...] = ()
    budgets: tuple[Budget, ...] = ()
    releases: tuple[str, ...] = ()


@record
class DraftScore:
    """Counterfactual: how many of the committed tokens from base_len on the drafter would have proposed (DESIGN idea 5)."""

    request_id: str
    base_len: int
    num_matched: int
    num_scored: int


@dataclass(frozen=True, slots=True)
class Verified:
    """What a level of a chain found of the drafts of the level below.

    Position i of a draft was reached ``num_reached[i]`` times (all before it were right) and right ``num_right[i]`` times.
    ``num_proposed`` of the ``num_asked`` tokens were proposed.
    """

    proposer: str
    num_reached: tuple[int, ...]
    num_right: tuple[int, ...]
    num_asked: int = 0
    num_proposed: int = 0


@dataclass(frozen=True, slots=True)
class LevelReport:
    """What a model that can be part of chains did since its last report."""

    drafter: str
    num_passes: int
    num_rows: int  # of those passes
    busy_s: float  # 0: not measured
    num_lost: int  # requests whose KV cache was evicted
    verified: tuple[Verified, ...] = ()


@record
class ProposalRound:
    """Drafter to target, once a round."""

    table_version: int
    proposals: tuple[Proposal, ...] = ()
    scores: tuple[DraftScore, ...] = ()
    resyncs: tuple[str, ...] = ()
    levels: tuple[LevelReport, ...] = ()


@dataclass(frozen=True, slots=True)
class SubmitRound:
    """Gateway to target: new requests, and requests whose caller disconnected."""

    submits: tuple[Request, ...] = ()
    aborts: tuple[str, ...] = ()


@record
class CommitRound:
    """Target to gateway, once a round."""

    commits: tuple[Commit, ...]


Message = DraftRound | ProposalRound | SubmitRound | CommitRound
