"""Arrays in device memory, through Python: on the simulated device (device_cases.py), and where there is no driver."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import types
from pathlib import Path

import device_cases
import dlpack_abi as abi
import numpy as np
import paramwire as pw
import pytest
from dlpack_abi import Producer

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "build" / "dev" / "tests" / "sim_cuda" / "libcuda.so.1"


@pytest.mark.skipif(not LIBRARY.exists(), reason="build/dev has no simulated driver: no nvcc, or nothing built")
@pytest.mark.parametrize("name", device_cases.CASES)
def test_on_the_simulated_device(name):
    run = subprocess.run(
        [sys.executable, device_cases.__file__, LIBRARY, name], check=False, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has a CUDA driver")
def test_without_a_driver_it_is_named_with_what_to_install(server, client):
    description = {"shape": (3,), "typestr": "<f8", "data": (0xDEAD0000, False), "version": 3}
    interface = types.SimpleNamespace(__cuda_array_interface__=description)
    arrays = (Producer(np.arange(3.0), device=(abi.CUDA, 0)), interface)
    text = "(libcuda.*NVIDIA driver|without CUDA)"
    with server.publish() as p:
        p.put("w", np.arange(3.0))
        for array in arrays:
            with pytest.raises(pw.UnavailableError, match=f'tensor "x".*{text}'):
                p.put("x", array)
    for array in (*arrays, *arrays):
        with pytest.raises(pw.UnavailableError, match=f"out is in .*{text}"):
            client.fetch("w", out=array)
    np.testing.assert_array_equal(client.fetch("w"), np.arange(3.0))
