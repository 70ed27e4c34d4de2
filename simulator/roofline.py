"""What passes cost on hardware that is not here, from its data sheet: a roofline, with what software wastes.

A pass of m rows over c tokens of context, of a model of L layers and P parameters in its matrices, on n devices:

    t = L t_launch + max(2 P m / (n F f), b P / (n W w)) + k (b kv c + 2 b kv m) / (n W w) + 2 L (t_hop + a m) [n > 1]

    F, W   peak operations and bytes of memory per second of a device; f, w: the shares of them that are reached
    b      bytes of a number; kv: numbers of keys and values of one token over all layers
    k      times that attention moves the keys and values: 1 where it reads them once, more where they are copied and padded
    a      bytes of a row's activations over the link's bandwidth: two all-reduces a layer under tensor parallelism

Prompts sample nothing: their rows pass no head. The head's rows are those sampled. Weights are read once, whatever m.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from cluster.config import Count, Fraction, Section
from router.cost_model import TableCost

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Device(Section):
    """A GPU and the software on it. Rates are of one; ``launch_us``: of one layer's kernels, whatever they compute."""

    tflops: Positive  # in the model's number format
    memory_gbps: Positive
    memory_gb: Positive
    compute_share: Fraction = 0.6
    memory_share: Fraction = 0.75
    launch_us: NonNegative = 0.0
    pass_us: NonNegative = 0.0  # of a pass, beside its layers
    kv_traffic: Annotated[float, Field(ge=1)] = 1.0
    link_gbps: Positive = 25.0  # of one device to the others
    link_us: NonNegative = 10.0  # of one all-reduce, however small


class Shape(Section):
    """A Llama-like model."""

    layers: Count
    hidden: Count
    ffn: Count
    vocab: Count = 32_000
    heads: Count = 32
    kv_heads: Count | None = None  # None: as many as heads
    bytes_per_number: Annotated[int, Field(ge=1, le=4)] = 2

    @property
    def layer_params(self) -> int:
        kv = self.hidden * (self.kv_heads or self.heads) // self.heads
        return self.layers * (2 * self.hidden * self.hidden + 2 * self.hidden * kv + 3 * self.hidden * self.ffn)

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    @property
    def params(self) -> int:
        """With the embedding, which costs memory and no time."""
        return self.layer_params + 2 * self.head_params

    @property
    def kv_numbers(self) -> int:
        """Of one token."""
        return 2 * self.layers * self.hidden * (self.kv_heads or self.heads) // self.heads


class Placed(Section):
    """A model on devices, under tensor parallelism where they are several."""

    shape: Shape
    device: Device
    parallelism: Count = 1

    def passes(self) -> "Passes":
        shape, device, n = self.shape, self.device, self.parallelism
        compute = n * device.tflops * 1e12 * device.compute_share / 2.0  # multiplications per second
        bandwidth = n * device.memory_gbps * 1e9 * device.memory_share
        kv_s = device.kv_traffic * shape.bytes_per_number * shape.kv_numbers / bandwidth
        fixed_s, row_s = 1e-6 * (device.pass_us + shape.layers * device.launch_us), 2 * kv_s
        if n > 1:
            fixed_s += 2e-6 * shape.layers * device.link_us
            activations = shape.bytes_per_number * shape.hidden * 2.0 * (n - 1) / n
            row_s += 2 * shape.layers * activations / (device.link_gbps * 1e9)
        return Passes(
            fixed_s,
            row_s,
            kv_s,
            layers_s=shape.bytes_per_number * shape.layer_params / bandwidth,
            head_s=shape.bytes_per_number * shape.head_params / bandwidth,
            layers_row_s=shape.layer_params / compute,
            head_row_s=shape.head_params / compute,
        )

    def kv_tokens(self, reserve: float = 0.1) -> int:
        """That fit beside the weights, with a share of the memory left free."""
        shape, device = self.shape, self.device
        free = self.parallelism * device.memory_gb * 1e9 * (1.0 - reserve) - shape.params * shape.bytes_per_number
        return max(0, int(free / (shape.kv_numbers * shape.bytes_per_number)))


@dataclass(frozen=True, slots=True)
class Passes:
    """The terms of the module's formula in seconds."""

    fixed_s: float
    row_s: float  # beside the matrices: its keys and values, and its activations on links
    context_s: float  # of a token attended to
    layers_s: float  # of reading the layers
    head_s: float
    layers_row_s: float  # of computing a row
    head_row_s: float

    def seconds(self, num_rows: int, num_context: int, num_sampled: int) -> float:
        computing_s = self.layers_row_s * num_rows + self.head_row_s * num_sampled
        reading_s = self.layers_s + self.head_s if num_sampled else self.layers_s
        longer_s = computing_s if computing_s > reading_s else reading_s
        return self.fixed_s + self.row_s * num_rows + self.context_s * num_context + longer_s


class RooflineCost:
    """`router.cost_model.CostModel` of placed models.

    A draft of L tokens is L passes of a row for each request of the batch, in contexts of ``context_len``.
    """

    def __init__(self, target: Placed, drafters: Mapping[str, Placed], context_len: int = 512) -> None:
        self.target = target
        self.passes = target.passes()
        self.drafters = {name: placed.passes() for name, placed in drafters.items()}
        self._context_len = context_len

    def step_s(self, num_rows: int, num_context: int) -> float:
        return self.passes.seconds(num_rows, num_context, num_rows)

    def prefill_s(self, num_rows: int, num_context: int) -> float:
        return self.passes.seconds(num_rows, num_context, 0)

    def table(self, num_context: int) -> TableCost:
        passes = self.passes
        knee = int((passes.layers_s + passes.head_s) / (passes.layers_row_s + passes.head_row_s))
        knots = tuple(sorted({1, 2, max(1, knee), knee + 1, knee + 2}))
        return TableCost(knots, tuple([self.step_s(knot, num_context) for knot in knots]))

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        passes = self.drafters.get(drafter)
        return None if passes is None else draft_len * passes.seconds(batch, batch * self._context_len, batch)

    def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
        """As rows that join the draft's first pass."""
        passes = self.drafters.get(drafter)
        if passes is None:
            return None
        return passes.seconds(1 + num_tokens, 1 + num_tokens, 1) - passes.seconds(1, 1, 1)
