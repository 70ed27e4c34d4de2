"""The messages on links: one per round and direction. The wire format is ``cluster/transport/wire.proto``."""

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.sampling_params import SamplingParams
from cluster.types import Commit, DraftTerms, Proposal, Request, record

PROTOCOL_VERSION = 8


class Role(StrEnum):
    TARGET = "target"
    DRAFTER = "drafter"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Hello:
    """Identity of one end of a link. A different version, tokenizer or secret refuses the link, with a reason."""

    role: Role
    name: str
    vocab_size: int
    tokenizer_fingerprint: str
    token: str = field(default="", repr=False, compare=False)  # the cluster's secret: never sent, empty in a peer's Hello
    protocol_version: int = PROTOCOL_VERSION
    instance: str = ""  # of a target: random, so that a link that was lost shows again whether its process had ended
    tensors: str = ""  # of a target: where drafters in other processes get its hidden states


@dataclass(frozen=True, slots=True)
class Open:
    """Opens a session for a request, with all committed tokens. Also the answer to a resync."""

    request_id: str
    token_ids: tuple[int, ...]  # prompt, then committed output
    prompt_len: int
    sampling: SamplingParams
    proposers: tuple[str, ...] = ()  # of a chain: they draft for the drafter, smallest first
    cache_salt: str = ""  # of the request
    trace: str = ""  # of the request


@record
class Extend:
    """Newly committed tokens of a session: positions base_len .. base_len + len(token_ids)."""

    request_id: str
    base_len: int
    token_ids: tuple[int, ...]


@record
class Budget:
    """The terms of each proposal for a request from now on."""

    request_id: str
    terms: DraftTerms


@record
class DraftRound:
    """Target to drafter, once per round. An unknown request, or an Extend at another than its length, causes a resync."""

    table_version: int
    opens: tuple[Open, ...] = ()
    extends: tuple[Extend, ...] = ()
    budgets: tuple[Budget, ...] = ()  # changes only
    releases: tuple[str, ...] = ()


@record
class DraftScore:
    """Counterfactual acceptance: how many committed tokens from base_len on the drafter would have proposed."""

    request_id: str
    base_len: int
    num_matched: int
    num_scored: int


@dataclass(frozen=True, slots=True)
class Verified:
    """Verification by one level of a chain of the drafts of the level below."""

    proposer: str
    num_reached: tuple[int, ...]  # by position of a draft: how often all before it were right
    num_right: tuple[int, ...]  # and it, too
    num_asked: int = 0  # tokens requested
    num_proposed: int = 0  # of them
    num_compared: int = 0  # tokens at which the distributions of both models were compared
    overlap: float = 0.0  # sum over them of 1 - total variation


@dataclass(frozen=True, slots=True)
class LevelReport:
    """Work of a model that can be a level of a chain, since its last report."""

    drafter: str
    num_passes: int
    num_rows: int  # of those passes
    busy_s: float  # 0: not measured
    num_lost: int  # requests whose KV cache was evicted
    verified: tuple[Verified, ...] = ()


@record
class DraftTiming:
    """A batch of drafts for ``num_requests`` requests, of any target, took ``seconds``, and before them ``waited_s`` for
    hidden states on a tensor link."""

    num_requests: int
    seconds: float
    waited_s: float = 0.0


@record
class OutcomeReport:
    """Of a drafter that prepares outcomes of a verification: commits to requests of any target that followed its proposals,
    since its last report."""

    num_commits: int = 0
    num_own: int = 0  # the drafter's own guess came true, bonus token included
    num_hits: int = 0  # another outcome that was prepared came true
    num_prepared: int = 0  # such outcomes

    def plus(self, other: "OutcomeReport") -> "OutcomeReport":
        commits, own = self.num_commits + other.num_commits, self.num_own + other.num_own
        return OutcomeReport(commits, own, self.num_hits + other.num_hits, self.num_prepared + other.num_prepared)

    @property
    def num_missed(self) -> int:
        return self.num_commits - self.num_own - self.num_hits

    @property
    def hit_rate(self) -> float:
        return (self.num_own + self.num_hits) / max(1, self.num_commits)


NO_OUTCOMES = OutcomeReport()


@record
class ProposalRound:
    """Drafter to target, once per round."""

    table_version: int
    proposals: tuple[Proposal, ...] = ()
    scores: tuple[DraftScore, ...] = ()
    resyncs: tuple[str, ...] = ()
    levels: tuple[LevelReport, ...] = ()
    timings: tuple[DraftTiming, ...] = ()
    outcomes: tuple[OutcomeReport, ...] = ()


@dataclass(frozen=True, slots=True)
class SubmitRound:
    """Gateway to target: new requests, and requests whose caller disconnected."""

    submits: tuple[Request, ...] = ()
    aborts: tuple[str, ...] = ()


@record
class CommitRound:
    """Target to gateway, once per round."""

    commits: tuple[Commit, ...]


Message = DraftRound | ProposalRound | SubmitRound | CommitRound
