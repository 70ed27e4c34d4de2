"""The section ``planner.draft_length``: the policy that decides how far to draft."""

from typing import Annotated, Literal

from pydantic import Field

from cluster.config.section import Count, Fraction, Section


class OutriderLength(Section):
    """Drafts on while the next token's survival is worth its draft time and its row; requests that gain nothing decode
    plainly."""

    kind: Literal["outrider"] = "outrider"


class FixedLength(Section):
    """Always the same number of tokens."""

    kind: Literal["fixed"] = "fixed"
    num_tokens: Annotated[int, Field(ge=1, le=64)] = 4  # at most max_draft_len of the drafter


class ThresholdLength(Section):
    """A draft ends with the first token of less confidence."""

    kind: Literal["threshold"] = "threshold"
    min_confidence: Fraction = 0.4


class AdaSpecLength(Section):
    """AdaSpec's adaptive drafter: a batch drafts on while that raises its predicted throughput."""

    kind: Literal["adaspec"] = "adaspec"


class FaserLength(Section):
    """FASER's adaptive drafting: a bandit over lengths for each request."""

    kind: Literal["faser"] = "faser"
    window: Count = 32  # rounds of a request that count


class TurboSpecLength(Section):
    """The one length for all requests that maximises expected tokens per second."""

    kind: Literal["turbospec"] = "turbospec"


DraftLengthConfig = Annotated[
    OutriderLength | FixedLength | ThresholdLength | AdaSpecLength | FaserLength | TurboSpecLength,
    Field(discriminator="kind"),
]
