"""What travels on links: one message per round and direction (DESIGN, the data plane).

Down is from the target (to a drafter, or to a gateway), up is towards it. Every message is a frozen dataclass; the wire
format is protobuf (``cluster/transport/wire.proto``), translated in ``cluster/transport/codec.py``.
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
    """What each end of a link says of itself. A mismatch of version, tokenizer or secret refuses the link with a reason.

    ``token`` is the cluster's shared secret. It stays in this process: ``cluster/transport/handshake.py`` proves that it is
    known without sending it, and the ``Hello`` of a peer has none.
    """

    role: Role
    name: str
    vocab_size: int
    tokenizer_fingerprint: str
    token: str = field(default="", repr=False, compare=False)
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Open:
    """A request to follow from here on, with all of its committed tokens. Also the answer to a resync."""

    request_id: str
    token_ids: tuple[int, ...]  # prompt, then what is committed of the output
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
    """Target to drafter, once a round. An Extend whose base is not the known length asks for a resync, and so does an
    unknown request. ``budgets`` holds changes only; a followed request keeps its last."""

    table_version: int
    opens: tuple[Open, ...] = ()
    extends: tuple[Extend, ...] = ()
    budgets: tuple[Budget, ...] = ()
    releases: tuple[str, ...] = ()


@record
class Score:
    """Counterfactual: of the committed tokens from base_len on, how many the drafter would have proposed (DESIGN idea 5)."""

    request_id: str
    base_len: int
    num_matched: int
    num_scored: int


@dataclass(frozen=True, slots=True)
class Verified:
    """What a level of a chain made of the drafts of the one below it. Of draft position i, all before it having been right:
    ``num_reached[i]`` times it was reached, ``num_right[i]`` times it was right. Of ``num_asked`` tokens, ``num_proposed``
    were proposed at all."""

    proposer: str
    num_reached: tuple[int, ...]
    num_right: tuple[int, ...]
    num_asked: int = 0
    num_proposed: int = 0


@dataclass(frozen=True, slots=True)
class LevelReport:
    """What a model that can stand in chains did since its last report, whether it was led or not."""

    drafter: str
    num_passes: int
    num_rows: int  # of those passes
    busy_s: float  # 0 where nobody took the time
    num_lost: int  # requests whose cache was given up for want of blocks
    verified: tuple[Verified, ...] = ()


@record
class ProposalRound:
    """Drafter to target, once a round."""

    table_version: int
    proposals: tuple[Proposal, ...] = ()
    scores: tuple[Score, ...] = ()
    resyncs: tuple[str, ...] = ()
    levels: tuple[LevelReport, ...] = ()


@dataclass(frozen=True, slots=True)
class SubmitRound:
    """Gateway to target: new requests, and requests whose caller is gone."""

    submits: tuple[Request, ...] = ()
    aborts: tuple[str, ...] = ()


@record
class CommitRound:
    """Target to gateway, once a round."""

    commits: tuple[Commit, ...]


Message = DraftRound | ProposalRound | SubmitRound | CommitRound
