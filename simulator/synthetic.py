"""Synthetic agreement: families of drafters whose acceptance differs by request.

Of request i, drafter j says token t as the answer has it with probability a_ij, independently of what was before, where

    logit a_ij = mean_j + common z_i + own_j e_ij           z, e standard normal

so that requests are hard or easy for all (z), and drafters differ in what is hard for them (e). Which tokens are missed is
partly the same for all drafters: with probability ``shared`` a token's difficulty is common. A draft is right up to its
first miss. With probability ``clumps`` a token is hit or missed as the one before it was: that keeps a_ij, and makes runs
longer, as those of lookups are. With ``decay`` the probability falls by that factor with each position, as of block
drafters. With ``token_spread`` tokens differ, too: logit a_ijt = logit a_ij + token_spread e_t, and a drafter's confidence
in a token is its a_ijt.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field, model_validator

from cluster.config import Section
from simulator.agreement import CONFIDENCE_STEPS, Agreement, AgreementAnswer

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Probability = Annotated[float, Field(ge=0, le=1)]
_LEAST = 0.01  # of an acceptance: nobody is always right, or always wrong


class DrafterFamily(Section):
    """Of one drafter: the acceptance of the median request, and how much it alone varies, in logits."""

    acceptance: Annotated[float, Field(gt=0, lt=1)]
    spread: Annotated[float, Field(ge=0, le=5)] = 0.5
    clumps: Annotated[float, Field(ge=0, lt=1)] = 0.0
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    silence: Probability = 0.0  # that it says nothing where its first token would be wrong
    token_spread: Annotated[float, Field(ge=0, le=5)] = 0.0  # of the tokens of a request, in logits
    runner_up: Annotated[float, Field(ge=0, lt=1)] = 0.0  # that a next choice is right where those before it are wrong

    @model_validator(mode="after")
    def _confident(self) -> Self:
        if self.token_spread and self.clumps:
            raise ValueError("of clumps and token_spread only one may be given: clumps leave no confidence of a token")
        return self


class Family(Section):
    """Of all drafters of a pool, on requests of one kind."""

    drafters: Mapping[str, DrafterFamily]
    common: Annotated[float, Field(ge=0, le=5)] = 0.5  # spread of the difficulty of requests, in logits
    shared: Probability = 0.5
    alike: Probability = 0.5  # that two drafters say the same where neither is right

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.drafters:
            raise ValueError("drafters must name at least one")
        return self

    def rates(self, random: np.random.Generator) -> dict[str, float]:
        """The acceptance of each drafter for one request."""
        difficulty = self.common * random.standard_normal()
        return {
            name: _clipped(_sigmoid(_logit(one.acceptance) + difficulty + one.spread * random.standard_normal()))
            for name, one in self.drafters.items()
        }

    def answer(
        self, random: np.random.Generator, output_len: int, draft_len: int, pairs: Sequence[tuple[str, str]] = ()
    ) -> AgreementAnswer:
        """A request of so many tokens. ``pairs``: (proposer, verifier) whose agreement with each other is wanted, too."""
        rates = self.rates(random)
        common = random.random(output_len)
        hits: dict[str, Bools] = {}
        token_rates: dict[str, Floats] = {}
        for name, rate in rates.items():
            own = random.random(output_len)
            limit: float | Floats = rate
            if spread := self.drafters[name].token_spread:
                noise = spread * random.standard_normal(output_len + draft_len)
                token_rates[name] = limits = np.clip(1.0 / (1.0 + np.exp(-_logit(rate) - noise)), _LEAST, 1.0 - _LEAST)
                limit = limits[:output_len]
            drawn = np.where(random.random(output_len) < self.shared, common, own) < limit
            hits[name] = _clumped(drawn, random, self.drafters[name].clumps)
        by_drafter = {}
        for name, one in self.drafters.items():
            right = runs(hits[name], draft_len)
            if one.decay < 1.0:
                right = np.minimum(right, _broken_off(random, one.decay, output_len, draft_len))
            drafted = np.full(output_len, draft_len, np.uint8)
            if one.silence:
                drafted[(right == 0) & (random.random(output_len) < one.silence)] = 0
            later = one.clumps + (1.0 - one.clumps) * rates[name]
            flat = tuple(
                (np.where(np.arange(draft_len) == 0, rates[name], later) * one.decay ** np.arange(draft_len)).tolist()
            )
            confidences = None
            if name in token_rates:
                of_tokens = sliding_window_view(token_rates[name], draft_len)[:output_len]
                decayed = of_tokens * one.decay ** np.arange(draft_len)
                confidences = np.rint(decayed * CONFIDENCE_STEPS).astype(np.uint16)
            ranks = b""
            if one.runner_up:
                ranks = np.minimum(random.geometric(one.runner_up, output_len), 255).astype(np.uint8).tobytes()
            by_drafter[name] = Agreement(drafted.tobytes(), right.astype(np.uint8).tobytes(), confidences, flat, ranks)
        inner = {}
        for a, b in pairs:
            both_wrong = ~hits[a] & ~hits[b] & (random.random(output_len) < self.alike)
            right = runs((hits[a] & hits[b]) | both_wrong, draft_len)
            drafted = np.full(output_len, draft_len, np.uint8)
            inner[a, b] = Agreement(drafted.tobytes(), right.astype(np.uint8).tobytes(), flat=(rates[a],) * draft_len)
        return AgreementAnswer(output_len, by_drafter, inner)


def runs(hits: Bools, longest: int) -> NDArray[np.int64]:
    """How many hits follow each other from each position on, at most ``longest``."""
    misses = np.append(np.flatnonzero(~hits), len(hits))
    at = np.arange(len(hits))
    return np.minimum(misses[np.searchsorted(misses, at)] - at, longest)


def _clumped(drawn: Bools, random: np.random.Generator, clumps: float) -> Bools:
    """Each as the one before it with probability ``clumps``."""
    if not clumps:
        return drawn
    renewed = random.random(len(drawn)) >= clumps
    renewed[:1] = True
    hits: Bools = drawn[np.maximum.accumulate(np.where(renewed, np.arange(len(drawn)), 0))]
    return hits


def _broken_off(random: np.random.Generator, decay: float, num: int, longest: int) -> NDArray[np.int64]:
    """How far drafts come when token k is spoiled with probability 1 - decay**k, independently."""
    spoiled = random.random((num, longest)) >= decay ** np.arange(longest)
    return np.where(spoiled.any(axis=1), spoiled.argmax(axis=1), longest)


def _logit(p: float) -> float:
    return float(np.log(p / (1.0 - p)))


def _sigmoid(x: float) -> float:
    return float(1.0 / (1.0 + np.exp(-x)))


def _clipped(p: float) -> float:
    return min(max(p, _LEAST), 1.0 - _LEAST)
