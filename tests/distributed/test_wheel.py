"""A wheel of this project, installed where there is no checkout, works as the checkout does.

The new environment sees the packages that the project depends on, and this project only from the wheel.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.lib.launcher import free_port
from tests.lib.recipes import write_chats
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint

pytestmark = pytest.mark.full  # most of a minute; `make test-wheel` runs it by itself
FOLDERS = ("data", "ds_configs", "engine", "launch", "model", "quant", "tools")
STEPS = 2


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that must succeed, without this checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))} failed:\n{done.stdout[-8000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: setuptools writes beside the sources. A folder that nobody listed would be in the copy too."""
    directory = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "runs", "tests", "benchmarks", "docs")
    shutil.copytree(ROOT, directory / "source", ignore=left_out)
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", directory)
    run(sys.executable, "-m", "pip", "wheel", *options, directory / "source", cwd=directory)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory) -> Path:
    """The Python of an environment with the wheel, and with the dependencies of the one that runs the tests."""
    directory = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", directory, cwd=directory)
    python = directory / "bin" / "python"
    options = ("--no-deps", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=directory)
    (site,) = directory.glob("lib/python*/site-packages")
    # A folder named in a .pth file is only added to the path: the .pth files in it, one of which may lead to the
    # checkout (an editable installation), are not read.
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return python


def test_the_wheel_holds_every_file_of_the_source(wheel: Path) -> None:
    there = set(zipfile.ZipFile(wheel).namelist())
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    wanted = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert wanted - there == set()
    assert {name.split("/")[0] for name in there if ".dist-info/" not in name} == set(FOLDERS)


def test_memory_and_training_run_from_outside_the_checkout(python: Path, tmp_path: Path) -> None:
    file = run(python, "-c", "import engine; print(engine.__file__)", cwd=tmp_path).strip()
    assert Path(file).is_relative_to(python.parents[1]), file
    recipe = {
        "model": {"path": str(tiny_checkpoint(tmp_path / "model"))},
        "data": {"train": [str(write_chats(tmp_path / "chats.jsonl"))], "max_length": 128},
        "train": {"steps": STEPS},
        "quant": {"calibration_batches": 1},
        "deepspeed": "zero3",
        "output_dir": "out",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    table = run(python, "-m", "launch.memory", "--config", "recipe.yaml", "--ranks", "2", cwd=tmp_path)
    shipped = {file.stem for file in (ROOT / "ds_configs").glob("*.json")}
    assert shipped <= set(table.split()), table

    deepspeed = (python, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port()))
    said = run(*deepspeed, "--module", "launch.train", "--config", "recipe.yaml", cwd=tmp_path)
    assert str(ROOT) not in said
    assert (tmp_path / "out" / "export" / "model.safetensors").is_file(), said
