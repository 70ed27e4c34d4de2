"""`outrider`, the default: rows for drafts and for prompts, where they bring most in the measured time of the pass."""

from collections.abc import Sequence

import numpy as np

from router.cost_model import Floats, Ints, TableCost
from router.drafting.ranking import Ranking
from router.drafting.verification import MIN_CHUNK_LEN, PassContext, PassRows
from router.plan import SequenceView


class OutriderVerification:
    """Maximises expected tokens per second of the pass, exactly: at every step, knee and cliff of the cost.

    Without prompts, of k draft tokens in order of survival, the best number maximises

        E(k) / T(k)              E: expected tokens, weighted, bonus tokens included; T: time of the pass

    and its value g is what a second of decoding yields. With prompts that wait, k and the prompt tokens c maximise

        E(k) + g s c - g T(k, c)

    where s is the time of a prompt token in a pass of prompts alone. So a row goes to a draft if its survival is worth more
    than the time that a prompt token would take elsewhere, and neither takes a row that costs more than it brings. Equal
    with c = 0. T stays within the limit of the context if any choice does. MIN_CHUNK_LEN prompt tokens are computed always,
    and as many as are due.

    The search may look at tokens beyond those that it admits: no admission rule changes the output.
    """

    def rows(self, ready: Sequence[SequenceView], context: PassContext) -> PassRows:
        if not ready:
            return PassRows([], _prompts_alone(context))
        num_context = sum([sequence.committed_len for sequence in ready])
        table = context.cost.table(num_context)
        num_ready, num_prompts = len(ready), context.num_prompt_tokens
        least_chunk = _least_chunk(context)
        ranking = Ranking(ready, context, max(0, context.capacity.max_pass_tokens - num_ready - least_chunk))
        if num_prompts:
            num_drafts, num_prompts = _with_prompts(ranking, num_ready, num_context, table, context)
        else:
            num_drafts = _best(ranking, num_ready, table, context)
        return PassRows(ranking.lens(num_drafts), num_prompts)


def _best(ranking: Ranking, num_ready: int, table: TableCost, context: PassContext) -> int:
    """The number of draft tokens."""
    seconds = table.at_each(np.arange(num_ready, num_ready + ranking.num_tokens + 1))
    rates = ranking.expected / seconds
    if context.limit_s is not None:
        rates = rates[: max(1, int(np.searchsorted(seconds, context.limit_s, side="right")))]
    return int(rates.argmax())


def _with_prompts(
    ranking: Ranking, num_ready: int, num_context: int, table: TableCost, context: PassContext
) -> tuple[int, int]:
    """Draft tokens and prompt tokens. All numbers of both are compared."""
    num_drafts, num_prompts = ranking.num_tokens, context.num_prompt_tokens
    limit_s = context.limit_s
    prompts = _prompt_table(table, context)
    expected = ranking.expected
    decoding_s = table.at_each(np.arange(num_ready, num_ready + num_drafts + 1))
    layers_s = prompts.at_each(np.arange(num_ready, num_ready + num_drafts + num_prompts + 1))
    sampling_s = decoding_s - layers_s[: num_drafts + 1]
    rates = expected / decoding_s
    value = float(rates.max() if limit_s is None else max(rates[0], rates[decoding_s <= limit_s].max(initial=0.0)))
    prompt_value = value * context.cost.prefill_s(num_prompts, 0) / num_prompts
    # score(k, c) = of_drafts[k] + of_rows[k + c]
    numbers = np.arange(num_drafts + num_prompts + 1)
    of_drafts = expected - value * sampling_s - prompt_value * numbers[: num_drafts + 1]
    of_rows = prompt_value * numbers - value * layers_s
    lows = numbers[: num_drafts + 1] + _least_chunk(context)
    highs = np.minimum(numbers[: num_drafts + 1] + num_prompts, context.capacity.max_pass_tokens - num_ready)
    if limit_s is not None:
        # What prompt tokens attend to makes a pass longer, not worth less: it takes as long elsewhere.
        first_s, token_s = context.prompt_context_s
        context_s = first_s + token_s * (numbers - 1)
        longest_s = limit_s - sampling_s + token_s * numbers[: num_drafts + 1]
        highs = np.minimum(highs, np.searchsorted(layers_s + context_s, longest_s, side="right") - 1)
        highs[0] = max(highs[0], lows[0])  # decoding goes on, and so do prompts
    is_possible = highs >= lows
    scores = np.where(is_possible, of_drafts + _range_max(of_rows, lows, np.maximum(highs, lows)), -np.inf)
    best = int(scores.argmax())
    chosen = of_rows[lows[best] : highs[best] + 1]
    most = chosen.max()
    longest = int(np.flatnonzero(chosen >= most - 1e-9 * abs(most))[-1])  # of equals, the one that ends prompts first
    return best, int(lows[best]) + longest - best


def _least_chunk(context: PassContext) -> int:
    return min(max(MIN_CHUNK_LEN, context.num_due_tokens), context.num_prompt_tokens)


def _prompts_alone(context: PassContext) -> int:
    num_prompts, num_context, limit_s = context.num_prompt_tokens, context.num_prompt_context, context.limit_s
    if limit_s is None or not num_prompts:
        return num_prompts
    low, high = _least_chunk(context), num_prompts
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if context.cost.prefill_s(middle, num_context) <= limit_s else (low, middle - 1)
    return low


def _prompt_table(table: TableCost, context: PassContext) -> TableCost:
    """``prefill_s`` over rows, at the points of ``table``. Without context: prompts attend to nothing of the requests that
    decode, and what they attend to of themselves takes as long in a later pass."""
    return TableCost(table.rows, tuple([context.cost.prefill_s(rows, 0) for rows in table.rows]))


def _range_max(values: Floats, lows: Ints, highs: Ints) -> Floats:
    """The greatest of ``values[low : high + 1]`` for each pair: maxima of stretches of 2^i values, two of which cover it."""
    exponents = np.frexp((highs - lows + 1).astype(np.float64))[1] - 1
    levels = [values]
    for i in range(int(exponents.max())):
        below, half = levels[-1], 1 << i
        levels.append(np.maximum(below, np.concatenate((below[half:], np.full(min(half, len(below)), -np.inf)))))
    stretches = np.stack(levels)
    greatest: Floats = np.maximum(stretches[exponents, lows], stretches[exponents, highs - (1 << exponents) + 1])
    return greatest
