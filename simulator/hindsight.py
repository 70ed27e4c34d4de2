"""The ceiling of rules of draft length and verification: drafts of exactly the tokens that will be accepted.

A drafter in hindsight ends each draft where the answer contradicts it, and is certain of what it drafts. It pays for the
steps that these tokens take and for nothing in vain: no rejected row, no step in which a draft ends, no place in a batch
for a request that gets no token. A cascade decides as live which members it queries, so that its ceiling is that of rules of
length and verification alone. A rule that knows less can only draft less of what is right or more of what is wrong. The
text, the drafter, the passes, prompts and links are those of every other arm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.assignment import drafter_of
from simulator.agreement import Agreement, AgreementAnswer, SimulatedRequest
from simulator.simulation import ClusterSpec, Load
from simulator.timing import DraftByCost, Work


@dataclass(frozen=True, slots=True)
class HindsightDrafts(DraftByCost):
    """As `DraftByCost` of the requests that get tokens, without a last step that yields none."""

    def seconds(self, drafter: str, batch: Sequence[Work]) -> float:
        drafted = [work for work in batch if work.num_tokens]
        if not drafted:
            return 0.0
        name, longest = drafter_of(drafter), max([work.num_tokens for work in drafted])
        catch_up_s = sum([self.cost.catch_up_s(name, work.num_behind) or 0.0 for work in drafted if work.num_behind > 0])
        return (self.cost.draft_s(name, len(drafted), longest) or 0.0) + catch_up_s


def with_hindsight(spec: ClusterSpec, load: Load) -> tuple[ClusterSpec, Load]:
    """The same cluster and requests, with drafts of the right tokens alone."""
    longest = max([drafter.max_draft_len for drafter in spec.drafters])
    requests = (replace(one, answer=_of_right_tokens(one, longest)) for one in load.requests)
    return replace(spec, draft_timer=HindsightDrafts(spec.cost)), replace(load, requests=requests)


def _of_right_tokens(request: SimulatedRequest, longest: int) -> AgreementAnswer:
    answer = request.answer
    certain = (1.0,) * longest
    by_drafter = {name: Agreement(one.right, one.right, flat=certain) for name, one in answer.by_drafter.items()}
    return AgreementAnswer(answer.output_len, by_drafter)
