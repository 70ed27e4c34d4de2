"""What has come of a request: its tokens and commits."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from cluster.types import Commit


@dataclass(slots=True)
class Completion:
    """What became of a request: its output, and its commits as they came."""

    token_ids: list[int] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)

    def add(self, commit: Commit) -> None:
        self.token_ids.extend(commit.token_ids)
        self.commits.append(commit)

    @property
    def has_ended(self) -> bool:
        return bool(self.commits) and self.commits[-1].finish is not None

    @property
    def num_proposed(self) -> int:
        return sum(commit.num_proposed for commit in self.commits)

    @property
    def num_accepted(self) -> int:
        return sum(commit.num_accepted for commit in self.commits)


@dataclass(frozen=True, slots=True)
class Completing:
    """Requests under way: what has come of each so far, and that all have ended, or why they could not."""

    completions: Sequence[Completion]
    ended: Future[None]
