# make help says what there is. Each target sets up what it needs and is quick when nothing changed.
#
# PYTHON=python3   interpreter that the virtual environment is made from
# VENV=.venv       where it is made; VENV=none uses PYTHON's own environment, installs nothing and
#                  needs no network
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.11.0
JOBS ?= $(shell nproc)
ITERS ?=
UNTIL_LOSS ?=
STAGE ?=
RESUME ?=
ONLY ?=
SEEDS ?=
CATCH2_INCLUDE ?=
FASTAMP_CUDA ?=
TORCHES ?= 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
PYTHONS ?= 3.10 3.11 3.12 3.13 3.14 3.15

ifeq ($(VENV),none)
  PY := $(PYTHON)
  ENVIRONMENT :=
  DEMO_ENVIRONMENT :=
  export PYTHONPATH := $(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))
else
  PY := $(abspath $(VENV))/bin/python
  ENVIRONMENT := $(VENV)/.fastamp-ready
  DEMO_ENVIRONMENT := $(VENV)/.fastamp-demo
endif

BUILD_DIR := build/make
export FASTAMP_BUILD_DIR := $(CURDIR)/$(BUILD_DIR)
export MAX_JOBS := $(JOBS)
export FASTAMP_CUDA
ifneq ($(SEEDS),)
  export SEEDS
endif
ifneq ($(CATCH2_INCLUDE),)
  export CMAKE_ARGS += -DCATCH2_INCLUDE=$(abspath $(CATCH2_INCLUDE))
endif

# Runs a command with the oneDNN level that this CPU survives.
RUN := $(PY) tools/with_cpu_isa.py --cache build/cpu_isa.json --

TESTS = $(RUN) $(PY) tools/run_tests.py --build-dir $(BUILD_DIR)

.PHONY: help build test test-all test-changed test-costs emulate-long simcuda mutants mutants-at-random gpu demo bench docs lint compat aarch64 torch-watch wheel wheel-test release-check clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo   train a model in mixed precision, from Python and C++ (ITERS=, UNTIL_LOSS=)'
	@echo 'make test   build, run the C++ and the Python tests of the product'
	@echo 'make test-all  every test (SEEDS=n for longer random ones); test-costs notes what each takes'
	@echo 'make emulate-long  the emulated CUDA kernels, with all cases under ThreadSanitizer too'
	@echo 'make simcuda  what needs a GPU, on a simulated CUDA device (ONLY=late)'
	@echo 'make mutants  break the CUDA kernels and their host code: does a test notice? Hours (ONLY=dense_cast.cu)'
	@echo 'make mutants-at-random  breaks drawn by a seed, of the scaler and the caches (ONLY=clip)'
	@echo 'make bench  measure fastamp beside torch.amp'
	@echo 'make gpu    build, tests, sanitizers and benchmarks on a GPU (STAGE="ctest pytest", RESUME=1)'
	@echo 'make docs   the site with guides and references, in build/site/html'
	@echo 'make lint   formatters, linters, type checks'
	@echo 'make compat TORCH=2.15.0  build and test against another torch, in an environment of its own'
	@echo 'make aarch64  cross-compile for 64-bit Arm, and test under qemu (on Debian 12)'
	@echo 'make torch-watch  has code of torch changed that fastamp wraps or imitates? (TORCHES="2.16.0")'
	@echo 'make wheel  one wheel for several torches and Pythons, in dist (TORCHES="2.11.0 2.15.0" PYTHONS="3.11 3.12")'
	@echo 'make wheel-test  installs it beside each of TORCHES with each of PYTHONS, and uses it'
	@echo 'make build  the native part and an editable install'
	@echo 'make release-check  all of these and more, hours of it; says what failed (ONLY="lint docs")'
	@echo 'make clean  remove build products (VENV stays)'
	@echo 'Variables: PYTHON=python3 VENV=.venv|none TORCH=torch==2.11.0 JOBS=n CATCH2_INCLUDE=folder'
	@echo '           FASTAMP_CUDA=AUTO|ON|OFF (AUTO; for demo OFF where there is no GPU)'

build: $(ENVIRONMENT)
	$(PY) tools/cmake_build.py --build-dir $(BUILD_DIR) --tests --jobs $(JOBS)
ifneq ($(VENV),none)
	@$(PY) tools/setup_venv.py editable --stamp $(VENV)/.fastamp-editable
endif

test: $(ENVIRONMENT)
	$(PY) tools/cmake_build.py --build-dir $(BUILD_DIR) --tests --product --jobs $(JOBS)
ifneq ($(VENV),none)
	@$(PY) tools/setup_venv.py editable --stamp $(VENV)/.fastamp-editable
endif
	$(TESTS)

test-all: build
	$(TESTS) --all

# What .ci/run runs: of test-all what the changes since FASTAMP_BASE can touch.
test-changed: build
	$(TESTS) --changed $(if $(MINUTES),--minutes $(MINUTES))

test-costs: build
	$(TESTS) --all --record

emulate-long: build
	$(RUN) $(PY) tools/run_tests.py --build-dir $(BUILD_DIR) --emulated

simcuda: build
	$(RUN) $(PY) tools/simulated_tests.py --build-dir $(BUILD_DIR) $(if $(ONLY),--only "$(ONLY)")

mutants: build
	$(PY) tools/mutate_kernels.py --build-dir $(BUILD_DIR) $(addprefix --only ,$(ONLY)); \
	  kernels=$$?; \
	  $(PY) tools/mutate_host.py --build-dir $(BUILD_DIR) $(addprefix --only ,$(ONLY)) && \
	  exit $$kernels

mutants-at-random: build
	$(RUN) $(PY) tools/mutate_at_random.py --build-dir $(BUILD_DIR) $(addprefix --only ,$(ONLY))

# Builds as its first stage: without Catch2 too, which `build` is not content with.
gpu: $(ENVIRONMENT)
	$(RUN) $(PY) tools/gpu_stage.py --build-dir $(BUILD_DIR) $(addprefix --stage ,$(STAGE)) \
	  $(if $(RESUME),--resume)

demo: $(DEMO_ENVIRONMENT)
	$(PY) tools/cmake_build.py --build-dir $(BUILD_DIR) --demo --jobs $(JOBS)
ifneq ($(VENV),none)
	@$(PY) tools/setup_venv.py editable --demo --stamp $(VENV)/.fastamp-editable
endif
	$(RUN) $(PY) tools/demo.py $(if $(ITERS),--iters $(ITERS)) $(if $(UNTIL_LOSS),--until-loss $(UNTIL_LOSS))

bench: build
	$(RUN) $(PY) -m benchmarks

docs: build
ifneq ($(VENV),none)
	sh tools/setup_system.sh docs '$(PYTHON)'
endif
	$(PY) tools/docs_site.py

lint: build
	$(PY) tools/lint.py --build-dir $(BUILD_DIR) --jobs $(JOBS) $(if $(MINUTES),--minutes $(MINUTES))

# Needs no environment of its own: makes one for each torch.
compat:
ifneq ($(VENV),none)
	sh tools/setup_system.sh all '$(PYTHON)' '$(CATCH2_INCLUDE)'
endif
	$(PYTHON) tools/compat.py --torch '$(TORCH)' --cuda $(or $(FASTAMP_CUDA),AUTO) --jobs $(JOBS)

aarch64: $(ENVIRONMENT)
ifneq ($(VENV),none)
	sh tools/setup_system.sh aarch64 '$(PYTHON)'
endif
	$(PY) tools/aarch64.py --cuda $(or $(FASTAMP_CUDA),OFF) --jobs $(JOBS)

# Downloads the wheels, installs none.
torch-watch: $(DEMO_ENVIRONMENT)
	$(PY) tools/torch_watch.py --torch $(TORCHES)

wheel: $(ENVIRONMENT)
	$(PY) tools/build_wheel.py $(addprefix --torch ,$(TORCHES)) $(addprefix --python ,$(PYTHONS)) \
	  --cuda $(or $(FASTAMP_CUDA),AUTO) --jobs $(JOBS)

wheel-test: $(ENVIRONMENT)
	$(PY) tools/wheel_test.py $(addprefix --torch ,$(TORCHES)) $(addprefix --python ,$(PYTHONS))

release-check: $(ENVIRONMENT)
	$(PY) tools/release_check.py $(addprefix --only ,$(ONLY))

clean:
	rm -rf build dist python/fastamp.egg-info python/fastamp/lib python/fastamp/include python/fastamp/share
	rm -f python/fastamp/_C.*.so python/fastamp/build_info.json $(VENV)/.fastamp-editable

# Made anew when the pinned versions change. The demo's part first: nobody waits for more than that.
$(VENV)/.fastamp-demo: pyproject.toml tools/setup_venv.py tools/setup_system.sh
	sh tools/setup_system.sh demo '$(PYTHON)'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) tools/setup_venv.py packages --demo --torch '$(TORCH)'
	touch $@

$(VENV)/.fastamp-ready: $(VENV)/.fastamp-demo
	sh tools/setup_system.sh all '$(PYTHON)' '$(CATCH2_INCLUDE)'
	$(PY) tools/setup_venv.py packages --torch '$(TORCH)'
	touch $@
