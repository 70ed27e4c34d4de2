"""The section ``slo``: classes of requests with service-level objectives."""

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from cluster.config.section import Milliseconds, Name, Section
from cluster.types import Slo

CUSTOM = "custom"  # class of requests that state objectives of their own

TtftMs = Annotated[float, Field(ge=0.001, le=600_000)]  # in seconds above 0, too


class SloClass(Section):
    """Objectives of a class. A class without any is best effort."""

    ttft_ms: TtftMs | None = None  # time to first token
    tpot_ms: Milliseconds | None = None  # mean time per token after the first

    def objectives(self, name: str) -> Slo:
        """As requests carry them."""
        ttft_s, tpot_s = (None if ms is None else ms / 1e3 for ms in (self.ttft_ms, self.tpot_ms))
        return Slo(ttft_s, tpot_s, name)


class SloConfig(Section):
    """Service-level objectives. Without classes and without objectives in calls, all requests are best effort."""

    classes: Annotated[Mapping[Name, SloClass], Field(max_length=32)] = {}
    default: Name | None = None  # class of calls that name none; None: best effort
    shed: bool = True  # refuse calls whose time to first token cannot be met, with 429

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if CUSTOM in self.classes:
            raise ValueError(f"classes must not be named {CUSTOM!r}: so are calls that state objectives of their own")
        if self.default is not None and self.default not in self.classes:
            known = ", ".join(self.classes) or "there are none"
            raise ValueError(f"default must be one of classes ({known}), got {self.default!r}")
        return self
