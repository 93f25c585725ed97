"""Comparison of ranks: the options that name files, and the environment variables that count."""

import pytest

from engine.cluster import nodes
from engine.config.config import recipe_options
from engine.config.hub import HUB
from tests.lib.recipes import minimal
from tests.unit.engine.config.test_hub import LOCAL_OPTIONS


def test_every_file_that_an_option_names_is_compared():
    """Samples are compared as they are read."""
    checkpoints = {key for key, _, item in recipe_options(minimal()) if HUB in item.metadata}
    files = {key for key, why in LOCAL_OPTIONS.items() if why.startswith("a file ")}
    assert checkpoints - {"data.train", "data.eval"} | files == nodes.files_of(minimal()).keys()


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("DEEPQAT_X", True),
        ("NVIDIA_TF32_OVERRIDE", True),
        ("NCCL_ALGO", True),
        ("TORCH_COMPILE_DISABLE", True),
        ("NCCL_SOCKET_IFNAME", False),
        ("TRITON_CACHE_DIR", False),
        ("CUDA_VISIBLE_DEVICES", False),
        ("RANK", False),
    ],
)
def test_an_environment_variable_counts_if_it_changes_numbers(monkeypatch, name, counts):
    monkeypatch.setenv(name, "1")
    assert (f"environment variable {name}" in dict(nodes._facts({}))) == counts


def test_an_error_is_shown_though_the_launch_is_wrong_too(monkeypatch):
    """A second error, of the launcher, must not take the place of the first one, which this rank is to print."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert nodes.tell_other_ranks("a bad recipe")
