"""Read GGUF files: names and shapes kept, quantised tensors dequantised, one tensor in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paramwire.model_file import ModelFileError, ModelTensor, to_bf16, view_as

__all__ = ["GgufFile"]

# float32 values dequantised at a time (16 MiB): bounds what a large tensor needs beside its result.
_CHUNK_VALUES = 4 * 1024 * 1024


class GgufFile:
    """A GGUF file, read through the package `gguf` (extra "models").

    The file is mapped by that package: replace model files by renaming, don't write into them while they are read.

    errors: ModelFileError naming the file when it isn't a whole GGUF file
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import gguf

        self.path = Path(path)
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelFileError(f"{self.path}: byte 0: magic is {magic!r}, expected b'GGUF'")
        try:
            self._reader: Any = gguf.GGUFReader(str(self.path))
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError, UnicodeDecodeError) as error:
            raise ModelFileError(
                f"{self.path}: of {size} bytes, not a whole GGUF file: {error}; fetch it again"
            ) from error
        self._tensors: dict[str, Any] = {}
        for tensor in self._reader.tensors:
            end = int(tensor.data_offset) + int(tensor.n_bytes)
            if end > size:
                raise ModelFileError(
                    f"{self.path}: byte {int(tensor.data_offset)}: tensor {tensor.name!r} ends at byte {end}, "
                    f"the file at {size}"
                )
            if tensor.name in self._tensors:
                raise ModelFileError(
                    f"{self.path}: byte {int(tensor.data_offset)}: tensor {tensor.name!r} stands twice"
                )
            self._tensors[tensor.name] = tensor

    def names(self) -> list[str]:
        """Tensor names in file order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, row-major, outermost axis first (GGUF stores it the other way round)."""
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def stored_type(self, name: str) -> str:
        """How the file stores a tensor: "Q4_1", "F32", ..."""
        return str(self._tensor(name).tensor_type.name)

    def metadata(self) -> dict[str, Any]:
        """Every key of the file with its value as Python types, without the reader's own "GGUF." keys."""
        return {key: field.contents() for key, field in self._reader.fields.items() if not key.startswith("GGUF.")}

    def tensor(self, name: str, *, dtype: str = "bf16") -> ModelTensor:
        """Read one tensor as `dtype`: "bf16" (rounded to nearest even) or "f32" (exactly the dequantised values).

        errors: KeyError for an unknown name; ModelFileError for another dtype or a type that gguf can't dequantise
        """
        import gguf

        if dtype not in ("bf16", "f32"):
            raise ModelFileError(f"{self.path}: dtype is {dtype!r}, expected 'bf16' or 'f32'")
        stored = self._tensor(name)
        shape = self.shape(name)
        columns = shape[-1] if shape else 1
        packed = stored.data.reshape(-1, stored.data.shape[-1]) if stored.data.ndim else stored.data.reshape(1, 1)
        out: npt.NDArray[Any] = np.empty((packed.shape[0], columns), "<u2" if dtype == "bf16" else "<f4")
        step = max(1, _CHUNK_VALUES // max(1, columns))
        for row in range(0, packed.shape[0], step):
            try:
                values = gguf.dequantize(packed[row : row + step], stored.tensor_type)
            except NotImplementedError as error:
                raise ModelFileError(
                    f"{self.path}: tensor {name!r}: stored as {self.stored_type(name)}: {error}"
                ) from error
            out[row : row + step] = to_bf16(values) if dtype == "bf16" else values
        return ModelTensor(name, dtype, shape, view_as(out.reshape(shape), dtype))

    def tensors(self, *, dtype: str = "bf16") -> Iterator[ModelTensor]:
        """Every tensor in file order, each read when it is asked for. See tensor()."""
        for name in self._tensors:
            yield self.tensor(name, dtype=dtype)

    def llama_config(self) -> dict[str, Any]:
        """The fields of LlamaConfig (compute/llama.hpp) for a Llama-shaped model.

        errors: ModelFileError naming the key that is missing or asks for what the graph lacks (rotary scaling, experts)
        """
        metadata = dict(self._reader.fields)

        def get(key: str, default: Any = None) -> Any:
            if key in metadata:
                return metadata[key].contents()
            if default is None:
                raise ModelFileError(f"{self.path}: key {key!r} is missing")
            return default

        architecture = get("general.architecture")
        if architecture != "llama":
            raise ModelFileError(f"{self.path}: general.architecture is {architecture!r}, expected 'llama'")
        scaling = get("llama.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self._tensors:
            raise ModelFileError(
                f"{self.path}: rotary scaling {scaling!r} with the file's frequencies is not supported"
            )
        experts = get("llama.expert_count", 0)
        if experts:
            raise ModelFileError(f"{self.path}: llama.expert_count is {experts}, expected 0")
        heads = int(get("llama.attention.head_count"))
        return {
            "layers": int(get("llama.block_count")),
            "width": int(get("llama.embedding_length")),
            "ffn_width": int(get("llama.feed_forward_length")),
            "vocabulary": self.shape("token_embd.weight")[0],
            "heads": heads,
            "kv_heads": int(get("llama.attention.head_count_kv", heads)),
            "head_size": int(get("llama.attention.key_length", 0)),
            "rotary_size": int(get("llama.rope.dimension_count", 0)),
            "rotary_base": float(get("llama.rope.freq_base", 10000.0)),
            "norm_epsilon": float(get("llama.attention.layer_norm_rms_epsilon")),
            "tied_head": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
        }

    def _tensor(self, name: str) -> Any:
        try:
            return self._tensors[name]
        except KeyError:
            raise KeyError(f"{self.path}: no tensor {name!r} among {len(self._tensors)}") from None
