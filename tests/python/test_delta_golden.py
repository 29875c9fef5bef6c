"""Golden vectors of deltas against an independent decoder.

Goal: FORMAT.md is complete and exact. Method: tests/golden/delta.txt holds deltas that the library wrote, with their
bases and results (make_delta.py); the library writes and reads them in tests/cpp/delta_golden_test.cpp,
delta_decoder.py reads them here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from delta_decoder import apply_delta, apply_onebit

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "delta.txt"
FORM_NAMES = ("same", "full", "xor", "steps", "sparse", "mixed")


def vectors(kind: str) -> list[dict[str, str]]:
    lines = [line.split() for line in GOLDEN.read_text().splitlines() if line.startswith(kind + " ")]
    return [dict(pair.split("=", 1) for pair in line[1:]) for line in lines]


@pytest.mark.parametrize("line", vectors("delta"), ids=lambda line: line["name"])
def test_an_independent_decoder_reads_every_delta(line):
    delta, base = bytes.fromhex(line["hex"]), bytes.fromhex(line["base"])
    assert apply_delta(delta, base).hex() == line["result"]
    assert FORM_NAMES[delta[5]] == line["form"]


@pytest.mark.parametrize("line", vectors("onebit"), ids=lambda line: line["name"])
def test_an_independent_decoder_reads_every_one_bit_delta(line):
    assert apply_onebit(bytes.fromhex(line["hex"]), bytes.fromhex(line["base"])).hex() == line["result"]


def test_the_vectors_have_every_form():
    assert {line["form"] for line in vectors("delta")} >= {"same", "full", "xor", "steps", "sparse"}
    assert {line["scale"] for line in vectors("onebit")} == {"matrix", "row"}
