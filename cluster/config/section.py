"""What all sections of the file have in common: strictness, and the kinds of values."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Auto = Literal["auto"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float32"]  # auto: the fastest on the device, see engine.dtypes
DrafterDtype = Literal["auto", "int8", "bfloat16", "float32"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(ge=0, le=4096)]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Milliseconds = Annotated[float, Field(gt=0, le=60_000)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the file: immutable, strict, and without keys that nobody reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class Resources(Section):
    """What one process takes. Ray reserves cpus and gpus; a fraction of a GPU shares it."""

    cpus: Share | Auto = "auto"
    gpus: Share | Auto = "auto"
    threads: Count | Auto = "auto"  # of matrix products on a CPU
    node_labels: Mapping[str, str] = {}  # only nodes that carry all of these Ray labels

    @model_validator(mode="after")
    def _whole_or_shared(self) -> Self:
        if self.gpus != "auto" and self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"gpus must be a whole number, or a fraction below 1 to share one, got {self.gpus}")
        return self
