"""Statistics of a drafter's replayed rounds: accepted lengths, acceptance by position, and calibration."""

import statistics
from collections.abc import Iterable, Sequence

from drafters.replay import Round
from profiler.calibration import Records
from profiler.reliability import auroc, calibrated_error, expected_calibration_error
from router.estimates.survival import OnlineSurvival

MIN_CASES = 30  # minimum per position for a calibration error


def mean_accepted_len(rounds: Sequence[Round]) -> float:
    return statistics.fmean(r.num_committed for r in rounds)


def conditional_acceptance(rounds: Iterable[Round], num_positions: int) -> list[float | None]:
    """For each position: how often its token was right, given that it was drafted and all before it were right."""
    tried, right = [0] * num_positions, [0] * num_positions
    for r in rounds:
        for position in range(min(len(r.confidences), r.num_accepted + 1, num_positions)):
            tried[position] += 1
            right[position] += position < r.num_accepted
    return [r / t if t else None for r, t in zip(right, tried, strict=True)]


def confidence_figures(rounds: Sequence[Round]) -> dict[str, float]:
    """Calibration of prefix survival; means over positions that at least MIN_CASES drafts reach.

    - ``ece``: expected calibration error of the drafter's confidences;
    - ``ece_floor``: what ``ece`` is expected to read with so many drafts if the confidences are right;
    - ``brier``: mean square of the difference between prediction and outcome (0 or 1), which unlike ``ece`` also falls as
      predictions tell drafts apart;
    - ``ece_online``: ``ece`` after online calibration, which learns from each draft after it was judged;
    - ``auroc``: probability that a surviving prefix has a higher confidence than one that did not survive, whatever
      their lengths, so that predicting shorter ones to survive counts;
    - ``auroc_by_position``: the mean over positions of the same among prefixes of equal length.
    """
    drafted = [r for r in rounds if r.confidences]
    if not drafted:
        return {}
    online = OnlineSurvival()
    foreseen = []
    for r in drafted:
        foreseen.append((online.survival([r.confidences])[0], r.num_accepted))
        online.record(r.confidences, r.num_accepted)
    records = Records.of([(r.confidences, r.num_accepted) for r in drafted])
    told = records.confidences.cumprod(axis=1)
    corrected = Records.of(foreseen).confidences
    reached = [(k, drafts) for k in range(records.max_len) if (drafts := records.reaching(k)).sum() >= MIN_CASES]
    predicted = [told[drafts, k] for k, drafts in reached]
    outcomes = [records.survived(k)[drafts] for k, drafts in reached]
    online_predicted = [corrected[drafts, k] for k, drafts in reached]
    pairs = list(zip(predicted, outcomes, strict=True))
    samples = {
        "ece": [expected_calibration_error(*pair) for pair in pairs],
        "ece_online": [expected_calibration_error(*pair) for pair in zip(online_predicted, outcomes, strict=True)],
        "ece_floor": [calibrated_error(one) for one in predicted],
        "brier": [float(((one - came_true) ** 2).mean()) for one, came_true in pairs],
        "auroc_by_position": [found for pair in pairs if (found := auroc(*pair)) is not None],
    }
    figures = {key: statistics.fmean(values) for key, values in samples.items() if values}
    pooled = auroc([p for ps in predicted for p in ps], [y for ys in outcomes for y in ys])
    return figures if pooled is None else figures | {"auroc": pooled}
