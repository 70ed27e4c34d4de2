"""How fast targets serve, with and without drafters: the base on which numbers of replicas are decided.

A batch of b requests with c tokens of context takes t(b (1 + k), c) for a pass that verifies k drafts of each, after the
drafter has taken d(b, k). A draft token is accepted with probability a if those before it were, so a round yields
(1 - a^(k+1)) / (1 - a) tokens, the bonus token included (Leviathan et al. 2023, equation 1):

    tokens per second of a request = max over k of (1 - a^(k+1)) / (1 - a) / (t(b (1 + k), c) + d(b, k))

Drafting and verifying are not overlapped here, so gains are on the low side. Requests without a drafter have k = 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from router.cost_model import CostModel

DRAFT_LENS = (0, 1, 2, 3, 4, 6, 8)
CHUNK_LEN = 1024  # prompt tokens of a pass by which their price is taken
CONTEXT_STEP = 4096  # tokens between which the price of context is taken
MAX_ACCEPTANCE = 0.99
TPOT_SHARE = 0.9  # of the objective, to which a target is filled: batches are not all alike


@dataclass(frozen=True, slots=True)
class TargetSize:
    """One target replica."""

    num_gpus: float
    max_num_sequences: int
    kv_tokens: int  # that its KV cache holds


@dataclass(frozen=True, slots=True)
class DrafterSize:
    """One replica of a drafter, and how well it drafts."""

    num_gpus: float
    capacity: int  # concurrent requests
    acceptance: float  # of a draft token, given that those before it were accepted; below 1
    max_draft_len: int = 8
    share: float = 1.0  # of requests that the router gives it where it has room for them


@dataclass(frozen=True, slots=True)
class Workload:
    """Mean lengths of requests."""

    prompt_len: float
    output_len: float


@dataclass(frozen=True, slots=True)
class Objectives:
    """That every request shall meet."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Service:
    """What one target serves at most, at its objectives."""

    requests_per_s: float
    batch: float  # requests that decode meanwhile
    prefill_s: float  # of a prompt

    @property
    def decode_work_s(self) -> float:
        """Of a request, in seconds of a target: all that is not its prompt."""
        return max(0.0, 1.0 / self.requests_per_s - self.prefill_s)


class ServiceRates:
    """Tables made once from a cost model; look-ups are cheap. ``drafters`` by configured name."""

    def __init__(self, cost: CostModel, target: TargetSize, drafters: Mapping[str, DrafterSize]) -> None:
        self.target = target
        self.drafters = dict(drafters)
        max_rows = target.max_num_sequences * (1 + max(DRAFT_LENS))
        self._step_s = [cost.step_s(rows, 0) for rows in range(1, max_rows + 1)]
        self._context_s = (cost.step_s(1, CONTEXT_STEP) - cost.step_s(1, 0)) / CONTEXT_STEP
        self._draft_s = {name: self._drafts_s(cost, name, size) for name, size in self.drafters.items()}
        self._lens = {name: _accepted_lens(size) for name, size in self.drafters.items()}
        self.prompt_token_s = (cost.prefill_s(CHUNK_LEN + 1, 0) - cost.prefill_s(1, 0)) / CHUNK_LEN

    def _drafts_s(self, cost: CostModel, name: str, size: DrafterSize) -> list[float]:
        """Of one draft token, by batch. A drafter that was not measured counts as free."""
        longest = size.max_draft_len
        return [(cost.draft_s(name, batch, longest) or 0.0) / longest for batch in range(1, size.capacity + 1)]

    def set_acceptance(self, name: str, acceptance: float) -> None:
        """What was measured while it served."""
        size = self.drafters[name] = replace(self.drafters[name], acceptance=min(acceptance, MAX_ACCEPTANCE))
        self._lens[name] = _accepted_lens(size)

    def plain_tokens_per_s(self, batch: float, context: float) -> float:
        """Of one request, when ``batch`` of them decode in a target and attend to ``context`` tokens together."""
        num = min(max(batch, 1.0), self.target.max_num_sequences)
        return 1.0 / (self._step_s[int(num + 0.5) - 1] + self._context_s * context)

    def drafted_tokens_per_s(self, name: str, batch: float, context: float) -> float:
        """As `plain_tokens_per_s`, when this drafter drafts for all of them, as far as it pays."""
        drafts_s, steps_s = self._draft_s[name], self._step_s
        num = min(max(batch, 1.0), self.target.max_num_sequences)
        draft_s = drafts_s[min(int(num + 0.5), len(drafts_s)) - 1]
        context_s, best = self._context_s * context, 0.0
        for draft_len, accepted_len in self._lens[name]:
            rate = accepted_len / (steps_s[int(num * (1 + draft_len) + 0.5) - 1] + context_s + draft_len * draft_s)
            if rate > best:
                best = rate
        return best

    def tokens_per_s(self, batch: float, context: float, shares: Mapping[str, float]) -> float:
        """Mean over requests of which these shares have a drafter."""
        rest, drafted = 1.0, 0.0
        for name, share in shares.items():
            if share > 0.0:
                rest -= share
                drafted += share * self.drafted_tokens_per_s(name, batch, context)
        return drafted if rest <= 0.0 else drafted + rest * self.plain_tokens_per_s(batch, context)

    def shares(self, num_replicas: Mapping[str, int], num_running: float) -> dict[str, float]:
        """Of running requests that each drafter has room for, all together at most one."""
        rest, found = 1.0, {}
        for name, size in self.drafters.items():
            room = num_replicas.get(name, 0) * size.capacity / max(1.0, num_running)
            found[name] = min(size.share, room, rest)
            rest -= found[name]
        return found

    def service(self, workload: Workload, objectives: Objectives, shares: Mapping[str, float]) -> Service:
        """The greatest rate of requests that one target sustains.

        With b requests decoding at r tokens per second each while no prompt is computed, x requests per second take the
        share p = x prefill_s of its time for prompts, so x output_len = (1 - p) b r. The batch is the one with the greatest
        x whose tokens come in time: 1 / (r (1 - p)) <= tpot_s. Where no batch meets that, a batch of one counts.
        """
        prefill_s = workload.prompt_len * self.prompt_token_s
        context_len = workload.prompt_len + workload.output_len / 2
        most = max(1.0, min(self.target.max_num_sequences, self.target.kv_tokens / max(1.0, context_len)))
        best: Service | None = None
        for batch in _batches(most):
            rate = batch * self.tokens_per_s(batch, batch * context_len, shares)
            requests_per_s = rate / (max(1.0, workload.output_len) + prefill_s * rate)
            in_time = batch / (rate * (1.0 - requests_per_s * prefill_s)) <= TPOT_SHARE * objectives.tpot_s
            if best is None or (in_time and requests_per_s > best.requests_per_s):
                best = Service(requests_per_s, batch, prefill_s)
        assert best is not None, "there is a batch of one"
        return best


def _accepted_lens(size: DrafterSize) -> list[tuple[int, float]]:
    """Draft lengths, and the tokens that a round with them yields."""
    a = size.acceptance
    return [(k, (1.0 - a ** (k + 1)) / (1.0 - a)) for k in DRAFT_LENS if k <= size.max_draft_len]


def _batches(most: float) -> list[float]:
    """1 to ``most`` in steps of about a tenth."""
    found, batch = [], 1.0
    while batch < most:
        found.append(batch)
        batch = max(batch + 1.0, batch * 1.1)
    return [*found, most]
