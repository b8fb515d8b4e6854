"""A GGUF file with all tensors dequantised to float32, for llama.cpp without quantisation."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys, LlamaFileType
from gguf.quants import dequantize

# The writer sets the first by itself; the second says how the tensors are quantised.
REPLACED = {Keys.General.ARCHITECTURE, Keys.General.FILE_TYPE}


def write_float32(source: Path, target: Path) -> None:
    """Write the tensors of `source` in float32, and its fields as they are, to `target`."""
    reader = GGUFReader(source)
    architecture = reader.fields[Keys.General.ARCHITECTURE].contents()
    part = target.with_suffix(".part")
    writer = GGUFWriter(part, architecture)
    writer.add_file_type(LlamaFileType.ALL_F32)
    for name, field in reader.fields.items():
        if name in REPLACED or name.startswith("GGUF."):
            continue
        kind, *parts = field.types
        of_items = parts[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, of_items)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)
