"""Drafting counts of a call."""

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
    # By draft length: the number of passes that accepted 0, 1, 2, ... of its tokens.
    histograms: dict[int, list[int]] = field(default_factory=dict)
    by_drafter: "dict[str, DraftingCounts]" = field(default_factory=dict)

    def record(self, commit: Commit, num_needed: int) -> None:
        """Counts a commit whose first ``num_needed`` tokens are in the answer."""
        num_accepted = min(commit.num_accepted, num_needed)
        self._add(1, num_needed, commit.num_proposed, num_accepted)
        if commit.num_proposed:
            self._histogram(commit.num_proposed)[num_accepted] += 1
        if commit.drafter is not None and commit.num_proposed:
            counts = self.by_drafter.setdefault(commit.drafter, DraftingCounts())
            counts._add(1, num_needed, commit.num_proposed, num_accepted)

    def merge(self, other: "DraftingCounts") -> None:
        self._add(other.num_rounds, other.num_tokens, other.num_proposed, other.num_accepted)
        for num_proposed, histogram in other.histograms.items():
            mine = self._histogram(num_proposed)
            for num_accepted, num_steps in enumerate(histogram):
                mine[num_accepted] += num_steps
        for name, counts in other.by_drafter.items():
            self.by_drafter.setdefault(name, DraftingCounts()).merge(counts)

    def _add(self, num_rounds: int, num_tokens: int, num_proposed: int, num_accepted: int) -> None:
        self.num_rounds += num_rounds
        self.num_tokens += num_tokens
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted

    def _histogram(self, num_proposed: int) -> list[int]:
        return self.histograms.setdefault(num_proposed, [0] * (num_proposed + 1))

    @property
    def num_rejected(self) -> int:
        return self.num_proposed - self.num_accepted

    @property
    def mean_accepted_len(self) -> float | None:
        """Tokens per target pass, with the bonus token. None before the first pass."""
        return self.num_tokens / self.num_rounds if self.num_rounds else None

    def as_json(self) -> dict[str, object]:
        """The ``acceptance`` object of an answer."""
        body = self._figures()
        body["drafters"] = {name: counts._figures() for name, counts in self.by_drafter.items()}
        return body

    def speculative_decoding(self) -> dict[str, object]:
        """vLLM's object of that name. A step is a pass that verified drafts; ``num_spec_tokens`` is the longest draft."""
        num_spec_tokens = max(self.histograms, default=0)
        accepted = [0] * (num_spec_tokens + 1)
        for histogram in self.histograms.values():
            for num_accepted, num_steps in enumerate(histogram):
                accepted[num_accepted] += num_steps
        num_steps = sum(accepted)
        return {
            "mean_acceptance_length": 1 + self.num_accepted / num_steps if num_steps else 1.0,
            "draft_acceptance_rate": self.num_accepted / self.num_proposed if self.num_proposed else 0.0,
            "acceptance_histogram": accepted,
            "acceptance_histogram_by_draft_length": {
                str(num_proposed): self.histograms[num_proposed] for num_proposed in sorted(self.histograms)
            },
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_proposed,
            "num_spec_tokens": num_spec_tokens,
        }

    def _figures(self) -> dict[str, object]:
        mean = self.mean_accepted_len
        return {
            "num_rounds": self.num_rounds,
            "num_proposed": self.num_proposed,
            "num_accepted": self.num_accepted,
            "mean_accepted_len": None if mean is None else round(mean, 4),  # with the bonus token
        }
