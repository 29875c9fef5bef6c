"""The cases of tests/gpu: those of a GPU, or of the simulated device."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from gpu_case_files import Case, read_cases

ROOT = Path(__file__).parents[2]
TWIN = ROOT / "build" / "dev" / "tests" / "gpu" / "gpu_sim_cases"


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """PARAMWIRE_GPU_CASES: a folder that gpu_cases wrote; otherwise its twin of build/dev writes one."""
    path = os.environ.get("PARAMWIRE_GPU_CASES", "")
    folder = Path(path) if path else tmp_path_factory.mktemp("gpu-cases")
    if not path:
        if not TWIN.exists():
            pytest.skip(f"{TWIN.relative_to(ROOT)} is not there: no nvcc, or nothing built")
        run = subprocess.run([TWIN, "--out", folder], check=False, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
    return read_cases(folder)
