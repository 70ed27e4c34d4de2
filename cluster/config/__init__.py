"""The configuration file: its sections and their defaults, which suit a laptop and need no trained drafters.

`outrider` adds the trained drafters that come with the model (`drafters.shipped`). "auto" is replaced once, in a new
Config: by `cluster.resolve.resolve`, and for dtypes by `engine.dtypes.resolve_dtypes`.
"""

from cluster.config.api import CUSTOM, ApiConfig, ReasoningParser, SloClass, SloConfig, ToolCallParser
from cluster.config.drafters import (
    DEFAULT_CAPACITY,
    DEFAULT_DRAFT_LEN,
    DEFAULT_DRAFTERS,
    HIDDEN_STATE_FORMS,
    MAX_LEARNED,
    TRAINED_KINDS,
    CascadeOptions,
    DrafterConfig,
    DrafterOptions,
    HiddenStateForm,
    HiddenStateKind,
    HiddenStateOptions,
    LayersOptions,
    ModelOptions,
    NgramOptions,
    SuffixOptions,
    TableOptions,
    Traits,
    VllmOptions,
    default_pool,
    lookups_in_pool,
    parts_of,
)
from cluster.config.file import (
    ClusterConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    ObservabilityConfig,
    ScalingConfig,
    StateConfig,
    SupervisionConfig,
    TlsConfig,
    TransportConfig,
    differing,
    load,
    show,
    with_fields,
)
from cluster.config.rules import DraftLengthConfig, PlannerConfig, PolicyConfig, RouterConfig
from cluster.config.section import Count, Fraction, Resources, Seconds, Section
from cluster.config.target import LoraModule, TargetConfig
