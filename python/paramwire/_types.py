"""The plain values that calls give back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class FallbackWarning(RuntimeWarning):
    """connect() goes on without a transport that should work between these two processes; the text has the reason."""


class Version(NamedTuple):
    """A version of the model: epochs fence restarts, counters count the publishes of one epoch from 1. Ordered.

    Unknown or none is None, never Version(0, 0).
    """

    epoch: int
    counter: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.counter}"


class TensorInfo(NamedTuple):
    """One tensor of a snapshot, under one of its names."""

    name: str
    dtype: str
    """"f32", "bf16", "f8_e4m3", ...: paramwire's word, whatever numpy can say of it."""
    shape: tuple[int, ...]
    nbytes: int
    blocks: int
    """1 unless the tensor is cut in parts."""
    version: Version
    """That wrote its newest block."""
    alias_of: str | None
    """The tensor that this is another name of."""
    codec: str
    """"raw", "planes" or "lz4": of its encoded blocks, if any is."""
    stored_nbytes: int
    """What its blocks are stored as, and what travels."""


class BlockInfo(NamedTuple):
    """One block of a tensor."""

    id: int
    """For Snapshot.fetch_block."""
    shard: str
    """"whole", "rows[0:2048]" or "heads[0:3]/9"."""
    version: Version
    nbytes: int
    codec: str
    stored_nbytes: int
    """What travels; `nbytes` with codec "raw"."""


class DeltaInfo(NamedTuple):
    """What a delta between two versions of a tensor says of itself."""

    form: str
    """"same", "full", "xor", "steps", "sparse", or "mixed"."""
    dtype: str
    raw_size: int
    """Bytes of base and of result."""
    delta_size: int
    """Bytes of the delta."""
    base_version: Version
    base_crc64: int
    result_crc64: int


class OnebitInfo(NamedTuple):
    """What a one-bit delta says of itself."""

    dtype: str
    scale: str
    """"matrix" or "row"."""
    rows: int
    """Scales: the first axis with "row", else 1."""
    columns: int
    """Elements to each."""
    delta_size: int
    """Bytes of the delta."""
    base_version: Version
    base_crc64: int
    lossy: bool
    """Always true."""


@dataclass(frozen=True)
class Durations:
    """How long one kind of call took: a histogram, in seconds."""

    count: int
    sum: float
    buckets: tuple[tuple[float, int], ...]
    """Upper end and number of the durations in it, ascending; empty ones are left out. An end is at most a quarter
    above the least duration of its bucket."""

    def quantile(self, part: float) -> float:
        """The upper end of the bucket that holds the duration of rank `part`, 0 to 1; 0.0 without any."""
        rank, seen = part * self.count, 0
        for upper, number in self.buckets:
            seen += number
            if seen >= rank:
                return upper
        return 0.0


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama-shaped decoder, in elements; the comment names the key of a Hugging Face config.json."""

    layers: int  # num_hidden_layers
    width: int  # hidden_size
    ffn_width: int  # intermediate_size
    vocabulary: int  # vocab_size
    heads: int  # num_attention_heads
    kv_heads: int  # num_key_value_heads
    head_size: int = 0  # head_dim; 0 means width / heads
    rotary_size: int = 0  # 0 means head_size
    rotary_base: float = 10000.0  # rope_theta
    norm_epsilon: float = 1e-5  # rms_norm_eps
    tied_head: bool = False  # tie_word_embeddings
    attention_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Sizes of a BERT-shaped encoder, in elements; the comment names the key of a Hugging Face config.json."""

    layers: int  # num_hidden_layers
    width: int  # hidden_size
    ffn_width: int  # intermediate_size
    vocabulary: int  # vocab_size
    heads: int  # num_attention_heads
    positions: int  # max_position_embeddings: most tokens of a text
    token_types: int = 2  # type_vocab_size
    norm_epsilon: float = 1e-12  # layer_norm_eps
    gelu: str = "exact"  # hidden_act; or "tanh"
    normalise: bool = False  # the output has length 1
