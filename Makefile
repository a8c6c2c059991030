# The project's commands. Each makes its own virtual environment if there is none.
# PYTHON: the interpreter to make it with (3.11 or newer).
# PYTHON_TO: the Python of the machine that `make wheels` fetches for.
# INSTALLER: the command that fills it. `uv pip install` unpacks in parallel: it takes half a minute, pip several.
# TORCH: a version of PyTorch, which gets a virtual environment of its own; by default the one that pip chooses.
PYTHON ?= python3
PYTHON_TO ?= 3.12
VENV := .venv$(addprefix -,$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALLER ?= $(BIN)/python -m pip install
QUICK := tests/ir tests/planner tests/report tests/test_*.py
SOURCES := ir planner runtime models rematplan benchmarks tests

# Without bytecode on disk, each process would compile every module that it imports, which takes several seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick docs kernels conformance lint format clean

demo: $(READY)  ## plan and run U-Net and ResNet-50; pictures and ONNX files go to demo/
	$(BIN)/rematplan demo --folder demo

test: $(READY)  ## run the tests, in two processes; PYTEST_ARGS="-k name" narrows them, TORCH=2.15.0 takes another PyTorch
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --durations=20 $(PYTEST_ARGS)

quick:  ## the tests of graphs, planner and report, and the laws of the tree
	$(MAKE) test PYTEST_ARGS="$(QUICK) $(PYTEST_ARGS)"

docs: $(READY)  ## the documentation as a site in build/site; warnings are errors
	$(BIN)/python -m mkdocs build --strict --quiet

kernels: $(READY)  ## compile the planner's hot loops, which the first run does otherwise
	$(BIN)/rematplan info warm

conformance: $(READY)  ## ONNX's own test suite against our op table: passed, refused, failed
	$(BIN)/python benchmarks/conformance.py --refusals

wheels:  ## fetch what a machine with PyTorch and without a network may lack: make wheels PYTHON_TO=3.12
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(PYTHON_TO) \
		$(addprefix --platform manylinux_2_,28_x86_64 27_x86_64 17_x86_64) --platform manylinux2014_x86_64 \
		--dest wheels ortools immutabledict platformdirs absl-py protobuf

gpu:  ## everything about a CUDA device in 8 minutes, by the PyTorch of $(PYTHON): gpu.json, gpu.md
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || \
		{ echo "make gpu: $(PYTHON) has no PyTorch that finds a CUDA device" >&2; exit 1; }
	@$(PYTHON) -c 'import ortools, platformdirs' 2>/dev/null || ls wheels/*.whl >/dev/null 2>&1 || \
		{ echo "make gpu: $(PYTHON) lacks ortools; run 'make wheels' where there is a network" >&2; exit 1; }
	@$(PYTHON) -c 'import ortools, platformdirs' 2>/dev/null || \
		$(PYTHON) -m pip install --quiet --no-index --no-deps --target build/gpu wheels/*.whl
	PYTHONPATH="$(CURDIR):$(CURDIR)/build/gpu" $(PYTHON) benchmarks/gpu.py --json gpu.json --table gpu.md

lint: $(READY)  ## ruff, and strict types of the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p rematplan

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv* build demo *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rematplan needs Python 3.11 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALLER) --quiet --editable ".[dev]" $(addprefix torch==,$(TORCH))
	touch $(READY)
