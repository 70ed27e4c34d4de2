"""Common to all sections: strict parsing and types of values."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Auto = Literal["auto"]
Device = Literal["auto", "cpu", "cuda"]
Engine = Literal["auto", "native", "vllm"]
# auto: the fastest on the device, see engine.dtypes
ModelDtype = Literal["auto", "as-shipped", "bfloat16", "float32"]
TargetDtype = Literal["auto", "as-shipped", "bfloat16", "float16", "float32"]
DrafterDtype = Literal["auto", "int8", "bfloat16", "float32"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(ge=0, le=4096)]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Milliseconds = Annotated[float, Field(ge=0.001, le=60_000)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A section of the file: immutable, strict, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    removed: ClassVar[Mapping[str, str]] = {}  # keys of older versions, and what became of each

    def changed(self, **values: Any) -> Self:
        """With these values, which are not checked. A dict for a section has values of its fields, others stay."""
        for name, value in values.items():
            if isinstance(known := getattr(self, name), Section) and isinstance(value, dict):
                values[name] = known.changed(**value)
        return self.model_copy(update=values)


def former(*constants: str, **others: str) -> Mapping[str, str]:
    """Of ``Section.removed``."""
    return {**dict.fromkeys(constants, "it is a constant now"), **others}


class Replicated(Section):
    """A section whose process has replicas."""

    if TYPE_CHECKING:  # each section has these fields in its own order, and with its own limits
        replicas: int  # at start
        min_replicas: int | None
        max_replicas: int | None

    @property
    def least(self) -> int:
        """Replicas at any time."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def scales(self) -> bool:
        """Whether replicas come and go while it serves."""
        return self.least != self.most

    @model_validator(mode="after")
    def _replicas_fit(self) -> Self:
        if not self.least <= self.replicas <= self.most:
            bounds = f"{self.least}, {self.replicas}, {self.most}"
            raise ValueError(f"replicas must lie between min_replicas and max_replicas, got {bounds}")
        return self


class Resources(Section):
    """Resources of one process. Ray reserves cpus and gpus; a fraction shares a GPU."""

    cpus: Share | Auto = "auto"
    gpus: Share | Auto = "auto"
    threads: Count | Auto = "auto"  # of matrix products on a CPU
    node_labels: Mapping[str, str] = {}  # only nodes that carry all of these Ray labels

    @model_validator(mode="after")
    def _whole_or_shared(self) -> Self:
        if self.gpus != "auto" and self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"gpus must be a whole number, or a fraction below 1 to share one, got {self.gpus}")
        return self

    @property
    def reserved(self) -> tuple[float, float]:
        """CPUs and GPUs; 0 where auto is not resolved."""
        cpus, gpus = (0.0 if value == "auto" else float(value) for value in (self.cpus, self.gpus))
        return cpus, gpus

    def check_device(self, device: Device) -> None:
        """Raises ValueError if the GPUs do not fit the device."""
        if device == "cpu" and self.gpus not in ("auto", 0):
            raise ValueError(f"resources.gpus must be 0 on device cpu, got {self.gpus}")
        if device == "cuda" and self.gpus == 0:
            raise ValueError("resources.gpus must be greater than 0 on device cuda, got 0: leave it out for one GPU")
