"""A GGUF file of other precision: the same values in bf16, f16 or Q8_0, so that llama.cpp serves what everybody serves."""

from pathlib import Path

import gguf

from cluster.errors import InvalidField

PRECISIONS = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}


def write_variant(source: Path, destination: Path, precision: str) -> None:
    """Dequantises the matrices of ``source`` and writes them in ``precision``; vectors stay float32, metadata are copied.

    Args:
        precision: one of PRECISIONS.

    Raises:
        InvalidField: the source is not a GGUF file.
    """
    try:
        reader = gguf.GGUFReader(source)
    except ValueError as error:
        raise InvalidField("source", str(source), f"is not a GGUF file ({error})") from error
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(destination, architecture, endianess=reader.endianess)
    skipped = {gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE, gguf.Keys.General.QUANTIZATION_VERSION}
    for name, found in reader.fields.items():
        if name in skipped or name.startswith("GGUF."):
            continue
        is_array = found.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, found.contents(), found.types[0], found.types[-1] if is_array else None)
    kind = PRECISIONS[precision]
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        chosen = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
