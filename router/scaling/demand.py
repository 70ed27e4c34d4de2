"""What requests that arrive need, in targets.

Prompts are due within their objective, so that floods of seconds count. Decoding lasts longer, so that averages do.

    prompts    = seconds of prompts that arrived within w / (w + slack), the greatest over w from one second to LONG_S
    decoding   = requests per second x decode work of one, over the time that a request decodes
    occupied   = requests that decode / the batch of a full target
    waiting    = seconds of prompts that wait / (SHORT_S + slack)
    need       = max(prompts + decoding, occupied) + waiting

The slack is what a prompt may wait. Of a short w, only what exceeds chance counts: n requests count as n - sqrt(n).
"""

from collections import deque
from collections.abc import Mapping
from math import sqrt

from router.scaling.report import FleetReport
from router.scaling.service_rates import Objectives, Service, ServiceRates, Workload

SHORT_S = 5.0
LONG_S = 30.0
SURE = 1.0  # standard deviations of a count that a burst must exceed chance by
MAX_DECODING_S = 120.0
LENGTHS_S = 300.0  # over which lengths are averaged
SLACK_SHARE = 0.5  # of the time to first token that may be spent waiting
SERVICE_S = 30.0  # for which what a target serves is not computed anew
MIN_DECODE_SHARE = 0.2  # of the time of a target, however many prompts arrive
NUM_ROUNDS = 6
SHARE_STEPS = 20  # to which shares of drafters are rounded
NO_DRAFTERS: Mapping[str, float] = {}
PRIOR_LEN = 256.0  # of prompts and outputs, until some were seen


class FadingMean:
    """A mean whose evidence fades."""

    def __init__(self, prior: float) -> None:
        self._sum, self._num = prior, 1.0

    @property
    def value(self) -> float:
        return self._sum / self._num

    def add(self, total: float, num: float, fade: float) -> None:
        if num > 0.0:
            self._sum, self._num = fade * self._sum + total, fade * self._num + num


class Demand:
    """Fed with every report."""

    def __init__(self, rates: ServiceRates, objectives: Objectives) -> None:
        self._rates, self._objectives = rates, objectives
        self._recent: deque[tuple[float, float, float, float]] = deque()  # end, length, requests, prompt tokens
        self._prompt_len, self._output_len = FadingMean(PRIOR_LEN), FadingMean(PRIOR_LEN)
        self._num = self._length_s = 0.0  # of the recent ones
        self._last_s: float | None = None
        self._services: dict[tuple[int, ...], Service] = {}  # by shares, all of one workload: they are compared
        self._served = self.workload
        self._service_s = -SERVICE_S

    @property
    def workload(self) -> Workload:
        return Workload(self._prompt_len.value, self._output_len.value)

    def service(self, now_s: float, shares: Mapping[str, float] = NO_DRAFTERS) -> Service:
        """Of a target when drafters have these shares of the requests. Without any it is the measure of need."""
        if now_s - self._service_s >= SERVICE_S:
            self._services, self._service_s, self._served = {}, now_s, self.workload
        key = tuple(round(SHARE_STEPS * share) for share in shares.values())
        if key not in self._services:
            rounded = {name: num / SHARE_STEPS for name, num in zip(shares, key, strict=True)}
            self._services[key] = self._rates.service(self._served, self._objectives, rounded)
        return self._services[key]

    def need(self, report: FleetReport) -> float:
        slack_s = SLACK_SHARE * self._objectives.ttft_s
        now_s, period_s = report.now_s, SHORT_S if self._last_s is None else report.now_s - self._last_s
        self._last_s = now_s
        fade = max(0.0, 1.0 - period_s / LENGTHS_S)
        self._prompt_len.add(report.num_prompt_tokens, report.num_arrived, fade)
        self._output_len.add(report.num_output_tokens, report.num_ended, fade)
        recent, service = self._recent, self.service(now_s)
        recent.append((now_s, period_s, report.num_arrived, report.num_prompt_tokens))
        self._num, self._length_s = self._num + report.num_arrived, self._length_s + period_s
        decoding_s = min(MAX_DECODING_S, max(LONG_S, self._output_len.value * self._objectives.tpot_s))
        while recent[0][0] <= now_s - decoding_s:
            _, one_s, arrived, _ = recent.popleft()
            self._num, self._length_s = self._num - arrived, self._length_s - one_s
        tokens_per_s = num = tokens = length_s = 0.0
        for _, one_s, arrived, prompt_tokens in reversed(recent):
            length_s, num, tokens = length_s + one_s, num + arrived, tokens + prompt_tokens
            if length_s >= LONG_S:
                tokens_per_s = max(tokens_per_s, tokens / length_s)
                break
            if arrived:
                sure = 1.0 - SURE / sqrt(num)
                tokens_per_s = max(tokens_per_s, sure * tokens / (length_s + slack_s))
        prompts = self._rates.prompt_token_s * tokens_per_s
        waiting = report.num_waiting * service.prefill_s / (SHORT_S + slack_s)
        decoding = max(0.0, self._num) / self._length_s * service.decode_work_s
        return max(prompts + decoding, report.num_running / service.batch) + waiting

    def num_running(self, now_s: float, headroom: float) -> float:
        """Requests that decode at once where so many times the targets that arrivals fill share them, by Little's law."""
        service, context_len = self.service(now_s), self._served.prompt_len + self._served.output_len / 2
        each_s = service.requests_per_s / max(1.0, headroom)
        alone = max(MIN_DECODE_SHARE, 1.0 - each_s * service.prefill_s)
        batch = service.batch
        for _ in range(NUM_ROUNDS):  # from above to the fixed point: fewer requests decode faster
            tokens_per_s = alone * self._rates.plain_tokens_per_s(batch, batch * context_len)
            batch = min(service.batch, each_s * self._served.output_len / tokens_per_s)
        return max(0.0, self._num) / max(self._length_s, 1.0) * batch / each_s
