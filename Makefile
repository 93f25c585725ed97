# Every target does its own set-up: it installs requirements.txt into the active virtual environment, or into .venv
# (made from PYTHON) when none is active, once per change of that file.
#
#   make quickstart    train, quantize, export and verify a small model
#   make test          all tests but the large counts
#   make test-full     all tests
#   make test-nvcc     the CUDA kernels: compiled for every architecture that is promised, and emulated on the CPU
#   make test-wheel    a wheel, installed alone in a fresh environment
#   make test-eval     those of the extra "eval", which is installed into .venv-eval
#   make test-gguf     those of the extra "llama-cpp", which is installed into .venv-llama-cpp
#   make test-vllm     exports in vLLM, which is installed into .venv-vllm (3 GB), or VLLM_PYTHON=... names; ten minutes
#   make test-mlx      those of the extra "mlx", which is installed into .venv-mlx
#   make test-executorch  those of the extra "executorch", which is installed into .venv-executorch
#   make test-peft     those of the extra "peft", which is installed into .venv-peft
#   make test-arrow    those of the extra "arrow", which is installed into .venv-arrow
#   make test-trackers  those of the extras "wandb", "mlflow" and "trackio", each in an environment of its own
#   make test-templates  chat templates of the extra "templates", which is installed into .venv-templates
#   make test-oldest   the unit tests on the oldest torch that is supported, which is installed into .venv-oldest (GBs)
#   make test-half-hour  benchmarks/gpu/half_hour.py on the CPU, all three stages in tiny sizes; four minutes
#   make mutants       faults put into the source one at a time, which the unit tests must find; hours
#   make golden        20 steps of tiny models against a record, bit for bit; five minutes
#   make lint          ruff: format and lint
#   make typecheck     mypy

PYTHON ?= python3
VENV := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)
# Names the checkout: an environment shared by two of them holds the editable install of the last one only.
STAMP := $(VENV)/.installed$(subst /,_,$(CURDIR))

GGUF_TESTS := tests/unit/model/save/test_gguf.py tests/unit/tools/test_gguf_to_checkpoint.py tests/distributed/tools/verify/test_engines.py
MLX_TESTS := tests/unit/quant/formats/test_layouts.py tests/distributed/tools/verify/test_engines.py
EXECUTORCH_TESTS := tests/unit/quant/formats/test_layouts.py tests/distributed/tools/verify/test_engines.py
TEMPLATE_TESTS := tests/unit/data/test_published_templates.py
PEFT_TESTS := tests/distributed/model/save/test_lora.py
ARROW_TESTS := tests/unit/data/test_rows.py
TRACKERS := wandb mlflow trackio
TRACKER_TESTS := tests/distributed/engine/test_trackers.py

# The deepspeed launcher and ninja (for ops that compile at first use) are looked up in PATH.
export PATH := $(VENV)/bin:$(PATH)
# Two ranks on a few cores: torch would start a thread per core in each.
test test-full test-eval test-gguf test-vllm test-mlx test-executorch test-peft test-arrow test-trackers test-templates \
    test-oldest: export OMP_NUM_THREADS = 1

.PHONY: quickstart test test-full test-nvcc test-wheel test-eval test-gguf test-vllm test-mlx test-executorch \
    test-peft test-arrow test-trackers test-templates test-oldest test-half-hour mutants golden lint typecheck
.DELETE_ON_ERROR:

quickstart: $(STAMP)
	$(VENV)/bin/python launch/quickstart.py

# The large counts draw other random numbers in each run, and say how to repeat them: see tests/lib/seeds.py.
test-full: export DEEPQAT_TEST_SEED ?= fresh

# Two files of tests at a time: a launch of two ranks leaves the cores idle while it starts. In the order of their names,
# so that the jobs of ranks come first: else those of few tests come last, the longest among them, and a core is idle.
test: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not full"

test-full: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
	.ci/eval $(VENV)
	.ci/extra $(VENV) llama-cpp $(GGUF_TESTS)
	.ci/extra $(VENV) mlx $(MLX_TESTS)
	.ci/extra $(VENV) executorch $(EXECUTORCH_TESTS)
	.ci/extra $(VENV) peft $(PEFT_TESTS)
	.ci/extra $(VENV) arrow $(ARROW_TESTS)
	for name in $(TRACKERS); do .ci/extra $(VENV) $$name $(TRACKER_TESTS) || exit 1; done
	PIP_NO_DEPS=1 .ci/extra $(VENV) templates $(TEMPLATE_TESTS)

# The CUDA kernels, where there is a compiler: nvcc for every architecture that is promised, g++ for the emulation. Both
# take a minute and more, so that `make test` leaves them out.
test-nvcc: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 tests/unit/quant/kernels/test_cuda_sources.py -k "compile or few or 251"

test-wheel: $(STAMP)
	$(VENV)/bin/python -m pytest tests/distributed/test_wheel.py

test-eval: $(STAMP)
	.ci/eval $(VENV)

test-gguf: $(STAMP)
	.ci/extra $(VENV) llama-cpp $(GGUF_TESTS)

test-vllm: $(STAMP)
	.ci/vllm $(VENV)

test-mlx: $(STAMP)
	.ci/extra $(VENV) mlx $(MLX_TESTS)

test-executorch: $(STAMP)
	.ci/extra $(VENV) executorch $(EXECUTORCH_TESTS)

test-peft: $(STAMP)
	.ci/extra $(VENV) peft $(PEFT_TESTS)

test-arrow: $(STAMP)
	.ci/extra $(VENV) arrow $(ARROW_TESTS)

test-trackers: $(STAMP)
	for name in $(TRACKERS); do .ci/extra $(VENV) $$name $(TRACKER_TESTS) || exit 1; done

test-templates: $(STAMP)
	PIP_NO_DEPS=1 .ci/extra $(VENV) templates $(TEMPLATE_TESTS)

test-oldest: $(STAMP)
	PIP_SECONDS=600 .ci/extra $(VENV) oldest -n 2 --dist loadfile -m "not full" tests/unit

test-half-hour: $(STAMP)
	for stage in A B C; do \
	    $(VENV)/bin/python benchmarks/gpu/half_hour.py $$stage --dry --out runs/half_hour --work runs/half_hour || exit 1; \
	done

mutants: $(STAMP)
	rm -rf build/mutants
	$(VENV)/bin/python -m tests.mutants.run --minutes 600

golden: $(STAMP)
	$(VENV)/bin/python tests/golden/record.py --check

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

typecheck: $(STAMP)
	$(VENV)/bin/mypy

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: DeepQAT needs Python 3.11 or 3.12, $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	           "say which one to use: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing requirements.txt into $(VENV): a minute, more where torch comes with CUDA"
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@rm -f $(VENV)/.installed*
	@touch $@
