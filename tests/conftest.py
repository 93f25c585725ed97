"""Settings of every process of tests before anything is imported, and the seeds of tests."""

import os

import pytest

from tests.lib import seeds

# DeepSpeed takes a GPU where there is one, at its import; what tests/gpu/ does on one says so itself.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# A path that is not there may be a name on the Hub: tests ask a stand-in alone (tests/lib/hub.py).
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Two processes of tests on two cores: with two threads each they wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def seed(request):
    """The test's own seed, which random, numpy and torch have at its start."""
    return seeds.seed_of(request.node.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    seeds.seed_all(seeds.seed_of(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Let a fixture of several tests draw the same numbers whichever of them comes first."""
    if fixturedef.scope == "function":
        return (yield)
    with seeds.drawing(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param_index', 0)}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    if report.failed and (value := os.environ.get(seeds.VARIABLE)):
        report.sections.append(("seed", f"{seeds.VARIABLE}={value} repeats it"))
    return report
