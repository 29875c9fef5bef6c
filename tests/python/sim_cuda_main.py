"""The command, with the simulated device as the CUDA driver of its process. Run by cli/test_compute.py.

usage: sim_cuda_main.py LIBRARY WORDS...
"""

import ctypes
import sys


def main() -> int | str:
    # Loaded by its path first, it is what "libcuda.so.1" means afterwards.
    simulation = ctypes.CDLL(sys.argv[1])
    simulation.sim_begin(1, 0, ctypes.c_uint64(64 << 20), 2)
    from paramwire import cli

    status = cli.main(sys.argv[2:])
    findings = ctypes.create_string_buffer(1 << 16)
    simulation.sim_failures(findings, ctypes.c_uint64(len(findings)))
    return findings.value.decode() or status


if __name__ == "__main__":
    sys.exit(main())
