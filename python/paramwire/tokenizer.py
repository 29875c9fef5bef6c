"""Text to token ids and back, from the vocabulary that a GGUF file carries (byte-level BPE)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paramwire.model_file import ModelFileError

__all__ = ["TextStream", "Tokenizer"]

# tokenizer.ggml.token_type: tokens that stand for themselves and are never split (control and user-defined).
_CONTROL = 3
_USER_DEFINED = 4

# tokenizer.ggml.pre: does the pre-tokenizer cut digits one by one before the byte-level split?
_SPLITS_DIGITS = {"smollm": True, "gpt-2": False}


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted (openai/gpt-2, src/encoder.py, bytes_to_unicode)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    table.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return table


class TextStream:
    """Turns tokens into text as they come; a character is shown when its last byte is there, never half of it."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while a character is incomplete. errors: ValueError for an unknown id"""
        if not 0 <= token < len(self._pieces):
            raise ValueError(f"token {token} is outside the vocabulary of {len(self._pieces)}")
        return self._decoder.decode(self._pieces[token])

    def finish(self) -> str:
        """What is left: "" or U+FFFD for a character that never came to its end. The stream can be used again."""
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """Byte-level BPE with the pre-tokenizer that the model was trained with.

    metadata: GgufFile.metadata(), or the same keys from elsewhere
    errors:   ModelFileError naming the key when it is missing or its value is not supported
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        model = self._get("tokenizer.ggml.model")
        if model != "gpt2":
            raise ModelFileError(f"tokenizer.ggml.model is {model!r}, expected 'gpt2' (byte-level BPE)")
        pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
        if pre not in _SPLITS_DIGITS:
            raise ModelFileError(f"tokenizer.ggml.pre is {pre!r}, expected one of {', '.join(_SPLITS_DIGITS)}")
        tokens: list[str] = list(self._get("tokenizer.ggml.tokens"))
        types: list[int] = [int(kind) for kind in self._get("tokenizer.ggml.token_type")]
        if len(types) != len(tokens):
            raise ModelFileError(
                f"tokenizer.ggml.token_type has {len(types)} entries, expected {len(tokens)} as tokens"
            )
        bytes_of = _bytes_of_characters()
        self._pieces: list[bytes] = []
        for token, kind in zip(tokens, types, strict=True):
            plain = kind in (_CONTROL, _USER_DEFINED) or any(character not in bytes_of for character in token)
            self._pieces.append(token.encode() if plain else bytes(bytes_of[character] for character in token))
        self._digits = _SPLITS_DIGITS[pre]
        self._bos = (
            int(metadata["tokenizer.ggml.bos_token_id"]) if metadata.get("tokenizer.ggml.add_bos_token") else None
        )
        self._encoder = self._build(tokens, types)

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return len(self._pieces)

    @property
    def end_of_text(self) -> int | None:
        """The token that ends an answer, if the file names one."""
        value = self._metadata.get("tokenizer.ggml.eos_token_id")
        return None if value is None else int(value)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Control tokens written in it ("<|im_start|>") become their ids: escape users' text."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids if self._bos is None else [self._bos, *ids]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`, control tokens too; invalid UTF-8 becomes U+FFFD. errors: ValueError for an unknown id"""
        stream = self.stream()
        return "".join([*(stream.push(token) for token in tokens), stream.finish()])

    def stream(self) -> TextStream:
        """A decoder for tokens that come one by one."""
        return TextStream(self._pieces)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text that asks the model for the next answer in a conversation.

        messages: {"role": "system" | "user" | "assistant", "content": text}, oldest first
        errors:   ModelFileError when the file has no chat template or one of another form than ChatML; ValueError for a
                  message without role or content
        """
        template = str(self._get("tokenizer.chat_template"))
        if "<|im_start|>" not in template or "<|im_end|>" not in template:
            raise ModelFileError("tokenizer.chat_template is not of the ChatML form; write the prompt's text yourself")
        turns = [(message.get("role"), message.get("content")) for message in messages]
        if not turns or any(not role or content is None for role, content in turns):
            raise ValueError(f"messages are {list(messages)!r}, expected at least one, each with role and content")
        if turns[0][0] != "system":
            # The template's own words for a conversation without a system message, if it has any.
            default = re.search(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", template, re.DOTALL)
            if default and "{{" not in default[1]:
                turns.insert(0, ("system", default[1]))
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return text + "<|im_start|>assistant\n"

    def _get(self, key: str) -> Any:
        if key not in self._metadata:
            raise ModelFileError(f"key {key!r} is missing from the model's metadata")
        return self._metadata[key]

    def _build(self, tokens: list[str], types: list[int]) -> Any:
        from tokenizers import AddedToken, models, pre_tokenizers
        from tokenizers import Tokenizer as Encoder

        merges: list[tuple[str, str]] = []
        for index, line in enumerate(self._get("tokenizer.ggml.merges")):
            left, space, right = line.partition(" ")
            if not space or not left or not right:
                raise ModelFileError(f"tokenizer.ggml.merges: entry {index} is {line!r}, expected two tokens")
            merges.append((left, right))
        encoder = Encoder(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if self._digits:
            encoder.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        else:
            encoder.pre_tokenizer = byte_level
        whole = [token for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
        encoder.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in whole])
        return encoder
