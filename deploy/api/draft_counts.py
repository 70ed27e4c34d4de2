"""Drafting counts of a call."""

from collections import Counter
from dataclasses import dataclass, field

from cluster.types import Commit


@dataclass(slots=True)
class DraftingCounts:
    """``num_rounds``: target passes that yielded tokens; in ``by_drafter`` only passes with drafts.

    ``num_accepted``: accepted draft tokens in the answer, without those after a stop string.
    """

    num_rounds: int = 0
    num_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_drafted_round_tokens: int = 0  # of rounds with drafts
    drafts: Counter[tuple[int, int]] = field(default_factory=Counter)  # by draft length and number of accepted tokens
    by_drafter: "dict[str, DraftingCounts]" = field(default_factory=dict)

    def record(self, commit: Commit, num_needed: int) -> None:
        """Counts a commit whose first ``num_needed`` tokens are in the answer."""
        num_accepted = min(commit.num_accepted, num_needed)
        self._add(1, num_needed, commit.num_proposed, num_accepted)
        if commit.num_proposed:
            self.num_drafted_round_tokens += num_needed
            self.drafts[commit.num_proposed, num_accepted] += 1
            if commit.drafter is not None:
                counts = self.by_drafter.setdefault(commit.drafter, DraftingCounts())
                counts._add(1, num_needed, commit.num_proposed, num_accepted)

    def merge(self, other: "DraftingCounts") -> None:
        self._add(other.num_rounds, other.num_tokens, other.num_proposed, other.num_accepted)
        self.num_drafted_round_tokens += other.num_drafted_round_tokens
        self.drafts.update(other.drafts)
        for name, counts in other.by_drafter.items():
            self.by_drafter.setdefault(name, DraftingCounts()).merge(counts)

    def _add(self, num_rounds: int, num_tokens: int, num_proposed: int, num_accepted: int) -> None:
        self.num_rounds += num_rounds
        self.num_tokens += num_tokens
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted

    def as_json(self) -> dict[str, object]:
        """The ``acceptance`` object of an answer."""
        drafters = {name: counts._figures() for name, counts in self.by_drafter.items()}
        return {**self._figures(), "drafters": drafters}

    def speculative_decoding(self) -> dict[str, object]:
        """vLLM's object of that name. A step is a pass that verified drafts; ``num_spec_tokens`` is the longest draft. Its
        mean counts tokens of the answer: no bonus token where a draft ended it."""
        draft_lens = sorted({draft_len for draft_len, _ in self.drafts})
        num_spec_tokens = max(draft_lens, default=0)
        num_steps = self.drafts.total()
        return {
            "mean_acceptance_length": self.num_drafted_round_tokens / num_steps if num_steps else 1.0,
            "draft_acceptance_rate": self.num_accepted / self.num_proposed if self.num_proposed else 0.0,
            "acceptance_histogram": [sum(self.drafts[k, i] for k in draft_lens) for i in range(num_spec_tokens + 1)],
            "acceptance_histogram_by_draft_length": {str(k): [self.drafts[k, i] for i in range(k + 1)] for k in draft_lens},
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_proposed,
            "num_spec_tokens": num_spec_tokens,
        }

    def _figures(self) -> dict[str, object]:
        mean = self.num_tokens / self.num_rounds if self.num_rounds else None  # with the bonus token
        return {
            "num_rounds": self.num_rounds,
            "num_proposed": self.num_proposed,
            "num_accepted": self.num_accepted,
            "mean_accepted_len": None if mean is None else round(mean, 4),
        }
