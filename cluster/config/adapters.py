"""``target.lora_modules``: adapters of the served model."""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from pydantic import Field

from cluster.config.section import Section
from cluster.model_name import HubName
from cluster.types import Adapter


class LoraModule(Section):
    """A LoRA adapter of the served model."""

    name: str = Field(min_length=1, max_length=256)  # which calls give as model
    path: Path  # folder in PEFT's format, on every machine with a target, or ORG/NAME[@REVISION] of a hub
    base_model_name: str | None = None  # vLLM's; must be a name of the served model

    @property
    def adapter(self) -> Adapter:
        """One of a hub has a revision (`deploy.model_files`)."""
        key = blake2b(f"{self.name}\0{self.path}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        named = HubName.parse(str(self.path))
        is_pinned = named is not None and named.revision is not None
        return Adapter(self.name, str(self.path if is_pinned else self.path.expanduser().absolute()), key)

    def check(self, where: str, names: Sequence[str]) -> None:
        """Raises ValueError unless it fits the model with these ``names``."""
        if self.name in names:
            raise ValueError(f"{where}.name: must differ from the names of the model, got {self.name!r}")
        if self.base_model_name not in (None, *names):
            raise ValueError(f"{where}.base_model_name: must be a name of the served model, got {self.base_model_name!r}")
