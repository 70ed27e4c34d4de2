"""The trained drafters shipped for the embedded model, under ``assets/drafters``. No torch."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cluster.config import (
    HIDDEN_STATE_FORMS,
    Config,
    DrafterOptions,
    HiddenStateOptions,
    LayersOptions,
    ModelConfig,
    TableOptions,
    default_pool,
)
from cluster.errors import IncompatibleTokenizer, ModelUnavailable
from cluster.model_name import HubName
from engine.models import hub
from engine.models.hub import no_progress

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "drafters"
_TABLE = "table.npz"  # as drafters.table.FILE
MODEL = ModelConfig().name  # that they were trained for

_OPTIONS: Mapping[str, Callable[..., DrafterOptions]] = {
    "table": TableOptions,
    "layers": LayersOptions,
    **{kind: partial(HiddenStateOptions, kind=kind) for kind in HIDDEN_STATE_FORMS},
}


def with_shipped(config: Config) -> Config:
    """Adds the shipped table and block drafter to the default pool, if the configuration is for the embedded model and names
    no drafters."""
    shipped = shipped_options(config.model.name).values()
    if "drafters" in config.model_fields_set or not shipped:
        return config
    table = next((options for options in shipped if isinstance(options, TableOptions)), None)
    blocks = [options for options in shipped if isinstance(options, HiddenStateOptions)]
    return config.model_copy(update={"drafters": default_pool(table, *blocks[:1])})


def shipped_options(model: str) -> dict[str, DrafterOptions]:
    """Options of the shipped drafters for ``model`` by name, ascending."""
    if model != MODEL:
        return {}
    return {name: _OPTIONS[kind](path=name) for name in shipped_names() if (kind := kind_of(FOLDER / name)) is not None}


def shipped_names() -> tuple[str, ...]:
    if not FOLDER.is_dir():
        return ()
    return tuple(sorted(path.name for path in FOLDER.iterdir() if kind_of(path) is not None))


def find_drafter(name_or_path: str) -> Path:
    """The folder or file of a trained drafter: a shipped one by name, any other by path, or by ORG/NAME of the hub, which is
    downloaded. Raises ModelUnavailable."""
    if name_or_path == Path(name_or_path).name and (FOLDER / name_or_path).exists():
        return FOLDER / name_or_path
    if (path := hub.local_folder(name_or_path)) is not None:
        return path
    if (name := HubName.parse(name_or_path)) is not None:
        return hub.fetch(name, no_progress)
    known = ", ".join(shipped_names()) or "none"
    raise ModelUnavailable(f"{name_or_path}: no folder of a trained drafter; shipped are: {known}; see `outrider train`")


def find_table(name_or_path: str) -> Path:
    """The file of a frequency table, by its path, its folder's path or the name of a shipped one."""
    path = find_drafter(name_or_path)
    return path / _TABLE if path.is_dir() else path


def check_trained_for(drafter: str, recorded: str | None, fingerprint: str, target: str) -> None:
    """Raises IncompatibleTokenizer if the tokenizer that a drafter was trained for, ``recorded`` (None: unknown), is not the
    target's. ``drafter`` and ``target`` are for the message."""
    if recorded not in (None, fingerprint):
        raise IncompatibleTokenizer(
            f"{drafter} was trained for a target with another tokenizer than that of {target}: "
            "train one for this target with `outrider train`"
        )


def kind_of(folder: Path) -> str | None:
    """Kind of the drafter in a folder; None if there is none."""
    if (folder / _TABLE).is_file():
        return "table"
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kind_of_config(raw) if isinstance(raw, dict) else None


def kind_of_config(raw: Mapping[str, Any]) -> str | None:
    """By the ``config.json`` of a drafter; None if it is none."""
    if "speculators_model_type" in raw:
        return str(raw["speculators_model_type"])
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return None
    return next((kind for kind in HIDDEN_STATE_FORMS if kind in str(architectures[0]).lower()), "layers")
