from __future__ import annotations

import array
import subprocess
import sys

import numpy as np
import paramwire
import pytest
from hypothesis import given
from hypothesis import strategies as st

# Check values over b"123456789": reveng.sourceforge.io/crc-catalogue, CRC-64/XZ and CRC-32/ISCSI.
CHECKS = [(paramwire.crc64, 0x995DC9BBDF1939FA), (paramwire.crc32c, 0xE3069283)]


@pytest.mark.parametrize(("crc", "check"), CHECKS)
def test_crc_gives_the_catalogue_value_over_any_contiguous_buffer(crc, check):
    text = b"123456789"
    for source in (text, bytearray(text), memoryview(text), array.array("B", text), np.frombuffer(text, np.uint8)):
        assert crc(source) == check


@pytest.mark.parametrize("crc", [paramwire.crc64, paramwire.crc32c])
@given(first=st.binary(), second=st.binary())
def test_crc_chains(crc, first, second):
    assert crc(second, before=crc(first)) == crc(first + second)


def test_crc_of_no_bytes_is_zero():
    assert paramwire.crc64(b"") == 0
    assert paramwire.crc32c(b"") == 0


def test_crc_refuses_a_strided_buffer_and_says_what_to_pass():
    with pytest.raises(ValueError, match="contiguous"):
        paramwire.crc64(np.arange(10, dtype=np.uint8)[::2])


def test_crc_refuses_what_is_no_buffer():
    with pytest.raises(TypeError):
        paramwire.crc64("text")


def test_rdma_library_is_neither_linked_nor_loaded_until_somebody_asks_for_it():
    dynamic = subprocess.run(["readelf", "-dW", paramwire._core.__file__], capture_output=True, text=True, check=True)
    assert "(NEEDED)" in dynamic.stdout
    assert "ibverbs" not in dynamic.stdout
    program = "import paramwire; print('ibverbs' in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
