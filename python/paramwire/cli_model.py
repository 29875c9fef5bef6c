"""Model files on their way to a server, and the description of a model that `serve` publishes beside its weights.

Two uint8 tensors under reserved names make a server enough for `generate`: the model's shape and its tokenizer, JSON.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import Progress, TaskID

import paramwire
from paramwire import huggingface
from paramwire.cli_common import CliError, notes
from paramwire.gguf_file import GgufFile
from paramwire.model_file import DTYPE_BITS, ModelFileError, ModelTensor, label_of, to_bf16, view_as
from paramwire.safetensors_file import SafetensorsFile
from paramwire.tokenizer import Tokenizer

RESERVED_PREFIX = "paramwire."
MODEL_NAME = "paramwire.model.json"
TOKENIZER_NAME = "paramwire.tokenizer.json"
# Most bytes of either description that `generate` takes from a server: vocabularies of some hundred thousand tokens
# have 20 MB.
DESCRIPTION_BYTES_MAX = 256 << 20

# Smallest tensors that are looked at for being the same twice (tied weights): norms of small models are often all ones,
# and equal by chance; embeddings and heads are far larger.
TIED_BYTES_MIN = 64 << 10

# Tensors above this are read and published in pieces of it: what is in memory of a file at once.
PIECE_BYTES = 64 << 20

FLOATS = ("f16", "bf16", "f32", "f64")


@dataclass(frozen=True)
class FileTensor:
    """A tensor that is still in its file."""

    name: str
    dtype: str | None  # its label; None: quantised, float32 when read
    shape: tuple[int, ...]
    read: Callable[[str], ModelTensor]  # as "bf16", "f32" or "keep"
    # The same of rows [begin, end), so that a large tensor need not be in memory whole; None: the file can't.
    read_rows: Callable[[str, int, int], ModelTensor] | None = None

    def size_bytes(self, dtype: str) -> int:
        """Bytes once it is read as `dtype`."""
        label = self.dtype or "f32"
        if dtype != "keep" and label in FLOATS:
            label = dtype
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPE_BITS[label] // 8


@dataclass
class Model:
    """One model in one or more files."""

    tensors: list[FileTensor]
    description: dict[str, Any] | None = None  # for MODEL_NAME; None: not known, `generate` can't use it
    tokenizer: dict[str, Any] | None = None  # for TOKENIZER_NAME: a GGUF file's "tokenizer." keys
    notes: list[str] = field(default_factory=list)


def as_served(array: npt.NDArray[Any], label: str | None, dtype: str) -> tuple[npt.NDArray[Any], str]:
    """`array` as it is published, and its label: floats as `dtype` ("bf16", "f32" or "keep"), others unchanged.

    errors: CliError for a type that paramwire does not store
    """
    try:
        label = label or label_of(array.dtype)
    except ModelFileError as error:
        raise CliError(str(error)) from error
    if dtype == "keep" or label == dtype or label not in FLOATS:
        return array, label
    if label == "bf16":
        bits = np.ascontiguousarray(array).view(np.uint16).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).reshape(array.shape), "f32"
    values = array.astype(np.float32)
    return (values, "f32") if dtype == "f32" else (view_as(to_bf16(values), "bf16"), "bf16")


@contextlib.contextmanager
def open_model(paths: Sequence[Path]) -> Iterator[Model]:
    """The tensors of all files as one model. errors: CliError naming the file, and both for a name that both hold."""
    model = Model([])
    homes: dict[str, Path] = {}
    with contextlib.ExitStack() as stack:
        for path in paths:
            try:
                if path.name.endswith(".index.json"):
                    found = open_index(path, stack)
                else:
                    found = open_gguf(path) if is_gguf(path) else open_safetensors(path, stack)
            except FileNotFoundError as error:
                raise CliError(f"{error}; check the path") from error
            except (ModelFileError, OSError) as error:
                raise CliError(str(error)) from error
            for tensor in found.tensors:
                if tensor.name.startswith(RESERVED_PREFIX):
                    raise CliError(
                        f"{path}: tensor {tensor.name!r}: names that begin with {RESERVED_PREFIX!r} are paramwire's own"
                    )
                if tensor.name in homes:
                    raise CliError(
                        f"{path}: tensor {tensor.name!r} is in {homes[tensor.name]} as well: serve one of them"
                    )
                homes[tensor.name] = path
            model.tensors += found.tensors
            model.description = model.description or found.description
            model.tokenizer = model.tokenizer or found.tokenizer
            model.notes += [note for note in found.notes if note not in model.notes]
        if model.description is not None and not is_whole(model):
            model.description = None
        yield model


def is_gguf(path: Path) -> bool:
    """By content, else by name: a cut or damaged file is then reported by the reader that it was meant for."""
    if path.exists() and not path.is_file():  # a pipe would be waited for; the other reader says what is wrong
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix == ".gguf"


def is_whole(model: Model) -> bool:
    """Whether the files hold the embedding at least: a description is of no use beside a part of a model."""
    names = {tensor.name for tensor in model.tensors}
    return bool(names & {"token_embd.weight", "model.embed_tokens.weight"})


def open_gguf(path: Path) -> Model:
    file = GgufFile(path)
    kinds = {"F32": "f32", "BF16": "bf16"}

    def reader(name: str) -> Callable[[str], ModelTensor]:
        kept = kinds.get(file.stored_type(name), "f32")
        return lambda dtype: file.tensor(name, dtype=kept if dtype == "keep" else dtype)

    model = Model(
        [FileTensor(name, kinds.get(file.stored_type(name)), file.shape(name), reader(name)) for name in file.names()]
    )
    metadata = file.metadata()
    try:
        config = file.llama_config()
    except (ModelFileError, KeyError) as error:
        model.notes.append(f"without a description for `generate`: {error}")
        return model
    model.description = {"name": str(metadata.get("general.name", path.stem)), "naming": "gguf", "config": config}
    model.tokenizer = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    return model


def file_tensors(file: SafetensorsFile) -> list[FileTensor]:
    def whole(name: str) -> Callable[[str], ModelTensor]:
        return lambda dtype: served(file.tensor(name), dtype)

    def rows(name: str) -> Callable[[str, int, int], ModelTensor]:
        return lambda dtype, begin, end: served(file.rows(name, begin, end), dtype)

    return [FileTensor(name, entry.dtype, entry.shape, whole(name), rows(name)) for name, entry in file.entries.items()]


def served(tensor: ModelTensor, dtype: str) -> ModelTensor:
    array, label = as_served(tensor.data, tensor.dtype, dtype)
    return ModelTensor(tensor.name, label, tensor.shape, array)


def open_safetensors(path: Path, stack: contextlib.ExitStack) -> Model:
    return described(path.parent, file_tensors(stack.enter_context(SafetensorsFile(path))))


def open_index(path: Path, stack: contextlib.ExitStack) -> Model:
    """A model in several safetensors files, by their index (Hugging Face's model.safetensors.index.json): every tensor
    must be in the file that the index says, and nowhere else.

    errors: ModelFileError naming index, file and tensor
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelFileError(f"{path}: the index is not JSON: {error}") from error
    homes = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(homes, dict) or not homes or not all(isinstance(home, str) for home in homes.values()):
        raise ModelFileError(f'{path}: "weight_map" is no object of file names')
    tensors: list[FileTensor] = []
    for home in sorted(set(homes.values())):
        if Path(home).name != home or home in (".", ".."):
            raise ModelFileError(f"{path}: file {home!r} does not lie beside the index")
        found = file_tensors(stack.enter_context(SafetensorsFile(path.parent / home)))
        for tensor in found:
            if homes.get(tensor.name) != home:
                where = f"in {homes[tensor.name]}" if tensor.name in homes else "nowhere"
                raise ModelFileError(f"{path.parent / home}: tensor {tensor.name!r} is {where} by {path.name}")
        missing = {name for name, where in homes.items() if where == home} - {tensor.name for tensor in found}
        if missing:
            raise ModelFileError(f"{path.parent / home}: {path.name} says that tensor {min(missing)!r} is here")
        tensors += found
    return described(path.parent, tensors)


def described(folder: Path, tensors: list[FileTensor]) -> Model:
    """The tensors as a model, with what the config.json beside them says of it."""
    model = Model(tensors)
    config = folder / "config.json"
    if not config.is_file():
        model.notes.append(f"without a description for `generate`: {config} is not there")
        return model
    try:
        names = {tensor.name for tensor in tensors}
        model.description = {
            "name": folder.name,
            "naming": "hf",
            "config": huggingface.llama_config(config, attention_bias="model.layers.0.self_attn.q_proj.bias" in names),
        }
        model.tokenizer = huggingface.tokenizer_metadata(folder)
    except ModelFileError as error:
        model.description = None
        model.notes.append(f"without a description for `generate`: {error}")
    return model


def publish_model(publish: paramwire.Publish, model: Model, dtype: str, block_bytes: int, progress: Progress) -> int:
    """Puts every tensor, one in memory at a time or a piece of it, and the description. returns: bytes put, equal
    tensors once
    """
    for note in model.notes:
        notes().print(note)
    task = progress.add_task("publishing", total=sum(tensor.size_bytes(dtype) for tensor in model.tensors))
    seen: dict[tuple[str, tuple[int, ...], int], FileTensor] = {}
    done = 0
    for tensor in model.tensors:
        if tensor.read_rows is not None and tensor.shape and tensor.size_bytes(dtype) > PIECE_BYTES:
            done += publish_pieces(publish, tensor, dtype, block_bytes, seen, progress, task)
            continue
        data = tensor.read(dtype)
        twin = find_twin(seen, tensor, data, dtype)
        if twin is not None:
            publish.alias(tensor.name, twin.name)
        else:
            publish.put_rows(tensor.name, data.data, block_bytes, dtype=data.dtype, shape=data.shape)
            done += data.data.nbytes
        progress.advance(task, tensor.size_bytes(dtype))
    for name, content in ((MODEL_NAME, model.description), (TOKENIZER_NAME, model.tokenizer)):
        if content is not None and model.description is not None:
            text = json.dumps(content, ensure_ascii=False, default=plain).encode()
            publish.put(name, np.frombuffer(text, np.uint8))
            done += len(text)
    return done


def publish_pieces(
    publish: paramwire.Publish,
    tensor: FileTensor,
    dtype: str,
    block_bytes: int,
    seen: dict[tuple[str, tuple[int, ...], int], FileTensor],
    progress: Progress,
    task: TaskID,
) -> int:
    """Puts a large tensor in its blocks, PIECE_BYTES of it in memory. returns: bytes put, 0 when an earlier tensor has
    the same ones
    """
    with contextlib.suppress(paramwire.NotFoundError):
        publish.remove(tensor.name)  # what it was cut in before
    row_bytes = tensor.size_bytes(dtype) // tensor.shape[0]
    step = max(1, block_bytes // row_bytes)
    crc = 0
    for begin, piece in pieces(tensor, dtype, step * max(1, PIECE_BYTES // (step * row_bytes))):
        crc = paramwire.crc64(flat_bytes(piece).data, before=crc)
        for first in range(0, piece.shape[0], step):
            part = piece.data[first : first + step]
            rows = (begin + first, begin + first + part.shape[0])
            publish.put(tensor.name, part, dtype=piece.dtype, rows=rows, shape=tensor.shape)
        progress.advance(task, piece.data.nbytes)
        label = piece.dtype
    twin = seen.setdefault((label, tensor.shape, crc), tensor)
    if twin is tensor:
        return tensor.size_bytes(dtype)
    rows_at_once = max(1, PIECE_BYTES // row_bytes)
    pairs = zip(pieces(tensor, dtype, rows_at_once), pieces(twin, dtype, rows_at_once), strict=True)
    if not all(np.array_equal(flat_bytes(one), flat_bytes(other)) for (_, one), (_, other) in pairs):
        return tensor.size_bytes(dtype)
    publish.remove(tensor.name)
    publish.alias(tensor.name, twin.name)
    return 0


def pieces(tensor: FileTensor, dtype: str, rows: int) -> Iterator[tuple[int, ModelTensor]]:
    """The tensor in pieces of `rows`, each with its first row."""
    assert tensor.read_rows is not None
    for begin in range(0, tensor.shape[0], rows):
        yield begin, tensor.read_rows(dtype, begin, min(begin + rows, tensor.shape[0]))


def flat_bytes(tensor: ModelTensor) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)


def find_twin(
    seen: dict[tuple[str, tuple[int, ...], int], FileTensor], tensor: FileTensor, data: ModelTensor, dtype: str
) -> FileTensor | None:
    """An earlier tensor with the very same bytes, if any: tied weights that a file holds twice are stored once."""
    if data.data.nbytes < TIED_BYTES_MIN:
        return None
    flat = flat_bytes(data)
    twin = seen.setdefault((data.dtype, data.shape, paramwire.crc64(flat.data)), tensor)
    if twin is tensor:
        return None
    return twin if np.array_equal(flat, flat_bytes(twin.read(dtype))) else None


def plain(value: Any) -> Any:
    """numpy's numbers and arrays, for json."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


# ---------------------------------------------------------------- the reading side


class ServedModel:
    """A model as a compute process sees it: from the description on the server alone."""

    def __init__(self, snapshot: paramwire.Snapshot, description: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        self._snapshot = snapshot
        self._naming = description["naming"]
        self._config: dict[str, Any] = dict(description["config"])
        self.name: str = description["name"]
        self.tokenizer = tokenizer

    @property
    def ends(self) -> frozenset[int]:
        """Tokens after which an answer is over."""
        end = self.tokenizer.end_of_text
        return frozenset() if end is None else frozenset([end])

    def encode(self, prompt: str, *, chat: bool) -> list[int]:
        """Token ids of a message in the model's chat template; without `chat` or a template, of the text as it is."""
        if chat:
            with contextlib.suppress(ModelFileError):
                prompt = self.tokenizer.chat_prompt([{"role": "user", "content": prompt}])
        return self.tokenizer.encode(prompt)

    def graph(self, layers: int | None = None) -> paramwire.Graph:
        """The model's graph; with `layers` that many of its layers, for what a process needs beside parameters."""
        config = self._config if layers is None else self._config | {"layers": layers}
        return paramwire.Graph.llama(config, naming=self._naming, tied=bool(config["tied_head"]))

    def state_bytes(self, context: int, step: int) -> int:
        """What a computation holds beside parameters: key/value cache of `context` tokens, activations of `step`.

        source: SessionOptions (compute/backend.hpp), whose sizes these are
        """
        config = self._config
        head = config["head_size"] or config["width"] // config["heads"]
        cache = 2 * config["layers"] * config["kv_heads"] * head * 4 * context
        return int(cache + 4 * (2 * config["width"] + 3 * config["ffn_width"]) * step)

    def bytes_of(self, graph: paramwire.Graph) -> int:
        """Bytes of the parameters that `graph` reads, each once."""
        infos = {info.name: info for info in self._snapshot.tensors()}
        stored = {infos[name].alias_of or name: infos[name].nbytes for name, _ in graph.parameters if name in infos}
        return sum(stored.values())


def read_served_model(snapshot: paramwire.Snapshot) -> ServedModel:
    """errors: CliError when the server tells nothing of its model, or something that this version can't read."""
    contents = []
    for name in (MODEL_NAME, TOKENIZER_NAME):
        if name not in snapshot:
            raise CliError(
                f"the server has no tensor {name!r}, so what its weights mean is not known here: publish the model "
                "with `paramwire serve`, from a GGUF file or from safetensors beside config.json and tokenizer.json"
            )
        size = snapshot.info(name).nbytes
        if size > DESCRIPTION_BYTES_MAX:
            raise CliError(
                f"{name!r} has {size} bytes, more than the {DESCRIPTION_BYTES_MAX} that a description may have"
            )
        try:
            contents.append(json.loads(bytes(snapshot.fetch(name))))
        except ValueError as error:
            raise CliError(f"{name!r} on the server is not JSON: {error}") from error
    description, metadata = contents
    try:
        return ServedModel(snapshot, description, Tokenizer(metadata))
    except (KeyError, TypeError, ModelFileError) as error:
        raise CliError(f"the server's description of its model can't be used: {error}") from error
