"""In which dtype weights lie in memory on a CPU, which may not be the configured one. No torch."""

from engine.compiling import kernels_fault
from engine.cpu_level import cpu_level


def held_dtype(dtype: str) -> str:
    """For a configured dtype, at the CPU level in force, with or without kernels.

    Without kernels torch makes the products. It has none with int8 weights, and below AVX-512 BF16 those in bf16 are about
    ten times slower than in fp32, so that weights are held in fp32 there, in twice the memory.

    Raises:
        InvalidField: ``OUTRIDER_CPU`` names no level of this machine.
    """
    if dtype == "float32":
        return dtype
    if kernels_fault() is None:
        return "bfloat16" if dtype == "auto" else dtype
    return "bfloat16" if cpu_level().has_bf16_products else "float32"
