"""Blocks of more than 4 GiB in checkpoints (UP-33): sizes and loops take 64 bits, and no call moves so much."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Saved as one block, verified, and restored in place, by a process of its own, so that its memory is its own. Values at
# both ends and on both sides of 2 and 4 GiB: what is cut, wrapped or left as zeros there differs. All else is zeros,
# which are on no page before somebody writes.
PROGRAM = """
import json, resource, sys, time
import numpy as np
import paramwire as pw
from paramwire import checkpoint

directory, gib, codec = sys.argv[1], float(sys.argv[2]), sys.argv[3]
count = int(gib * 2**30) // 4 + 3
marked = [0, 1, 2**29 - 1, 2**29, 2**29 + 1, 2**30 - 1, 2**30, 2**30 + 1, count - 2, count - 1]
marked = [at for at in marked if at < count]
array = np.zeros(count, np.float32)
array[marked] = np.arange(1, len(marked) + 1)
times, at = {}, time.monotonic()

def lap(name):
    global at
    now = time.monotonic()
    times[name], at = round(now - at, 2), now

limit = 4 * array.nbytes
saved = checkpoint.save(directory, {"x": array}, block_bytes=array.nbytes, workers=1, codec=codec, memory_limit=limit)
lap("save")
found = checkpoint.verify(directory, decode=codec != "raw", workers=1, memory_limit=limit)
lap("verify")
crc = pw.crc64(array)
array[:] = 7
lap("overwrite")
with pw.Checkpoint(directory) as opened:
    blocks = [block[3] for block in opened.blocks("x")]
    opened.read("x", out=array, workers=1, memory_limit=limit)
lap("restore")
same = pw.crc64(array) == crc and array[marked].tolist() == list(range(1, len(marked) + 1))
print(json.dumps({"blocks": blocks, "nbytes": array.nbytes, "full": saved.blocks_full, "problems": len(found.problems),
                  "bytes": found.bytes, "same": same, "times": times,
                  "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}))
"""


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_a_block_of_more_than_four_gibibytes_is_saved_verified_and_restored(tmp_path: Path, codec: str, soak: bool):
    """With --soak, which takes 6 GiB of memory, 6 GB of disk and a minute; else the same of 30 MiB."""
    gib = 5.01 if soak else 0.03
    try:
        words = [sys.executable, "-c", PROGRAM, tmp_path / "d", str(gib), codec]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(tmp_path / "d", ignore_errors=True)  # pytest keeps what tests leave, and this is gigabytes
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    logging.getLogger(__name__).info("%s: seconds %s, %d MiB at most", codec, facts["times"], facts["peak"])
    assert facts["nbytes"] >= gib * 2**30
    assert facts["blocks"] == [facts["nbytes"]], "one block, not many"
    assert facts["full"] == 1
    assert facts["problems"] == 0
    assert facts["same"]
    if codec == "raw":
        assert facts["bytes"] > facts["nbytes"]
