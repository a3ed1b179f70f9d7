# `make demo` and `make test` each do all their set-up: a .venv in the checkout, then the job.
# `make test` takes six and a half minutes on two cores. `make test-all` adds what is marked `all`: the other doubles of TensorRT-LLM,
# kernels that FlashInfer's compiler makes, ranks, Ray, environments of real wheels, the kernels as other Tritons compile them.
# `make vllm` makes an environment for each wheel of vLLM that requirements/ names, and tests the door into it: two minutes after the installs.
# `make sglang` does the same for the wheels of SGLang.
# `make results` writes the figures on pages from the files that runs wrote, and the table of models from the code.
# `make environments` makes the table tests/integration/environments.json anew: an hour.
# `make device` runs FlashInfer's SM120 kernels, translated, on a Hopper GPU and keeps the numbers in docs/sm12x-on-hopper.json.
# `make device-own` does the same for our own kernels, in docs/own-on-hopper.json.
PYTHON ?= python3
VENV ?= .venv
DEMO ?= .demo
TESTS ?= tests
BIN := $(VENV)/bin
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
BED := $(BIN)/python -m tests.integration.sm12x_on_hopper
OWN := $(BED).own_run

# Python compiles a module at its first import. Compiling all of them takes longer than the rest of an installation.
export PIP_COMPILE := 0

# A worker runs whole files, whose fixtures are made once, on one thread of torch's: two workers with a thread per core each take
# four times as long.
test test-all vllm vllm-0.33 vllm-0.28 sglang sglang-0.5.23 sglang-0.5.20: export OMP_NUM_THREADS := 1

.PHONY: demo test test-all vllm vllm-0.33 vllm-0.28 sglang sglang-0.5.23 sglang-0.5.20 environments device device-own results lint bench clean

demo: $(VENV)/.demo
	@echo "Exporting a small Qwen3-MoE to $(DEMO): 20 seconds"
	$(BIN)/python -m tests.integration.exports qwen3-moe $(DEMO) --original
	$(BIN)/trtllm-b12x verify $(DEMO)/nvfp4 --original $(DEMO)/original --require-b12x

test: $(VENV)/.test
	$(BIN)/python -m pytest $(WORKERS) -m "not all" $(TESTS)

test-all: $(VENV)/.test
	$(BIN)/python -m pytest $(WORKERS) -m all $(TESTS)

vllm: vllm-0.33 vllm-0.28

vllm-0.33: .venv-vllm-0.33/.test
	.venv-vllm-0.33/bin/python -m pytest tests/integration/vllm

vllm-0.28: .venv-vllm-0.28/.test
	.venv-vllm-0.28/bin/python -m pytest tests/integration/vllm -k "not interpreter"

sglang: sglang-0.5.23 sglang-0.5.20

sglang-0.5.23: .venv-sglang-0.5.23/.test
	.venv-sglang-0.5.23/bin/python -m pytest tests/integration/sglang

sglang-0.5.20: .venv-sglang-0.5.20/.test
	.venv-sglang-0.5.20/bin/python -m pytest tests/integration/sglang

environments: $(VENV)/.test
	$(BIN)/python -m tests.integration.environments --again

device: $(VENV)/.test
	$(BIN)/python -m pytest tests/integration/test_sm12x_on_hopper_device.py tests/integration/test_b12x_device.py
	$(BIN)/python -m benchmarks.decode .device/decode
	$(BIN)/python -m tests.integration.exports qwen3-moe .device/exports/qwen3-moe
	$(BIN)/python -m tests.integration.exports nemotron-h .device/exports/nemotron-h
	$(BED).run build --processes $$(nproc) --cache .kernels
	$(BED).run measure --cache .kernels --exports .device/exports --out .device/result.json
	$(BIN)/python -m benchmarks.results --take .device/result.json

# Our own kernels for SM12x on a Hopper GPU: about 20 minutes.
device-own: $(VENV)/.test
	$(BIN)/python -m pytest tests/integration/test_sm12x_on_hopper_device.py
	$(OWN) measure .device/own.json --processes $$(( $$(nproc) / 2 + 1 ))
	$(OWN) mutate .device/own.json
	$(OWN) start .device/own.json
	SM12X_ON_HOPPER=120 $(BIN)/python -m pytest tests/integration/test_kernels_device.py tests/integration/test_cuda_device.py
	$(BIN)/python -m benchmarks.results --take .device/own.json

results: $(VENV)/.test
	$(BIN)/python -m benchmarks.results

bench: $(VENV)/.demo
	$(BIN)/python -m benchmarks.overhead

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror trtllm_b12x/kernels/cuda/*.cu* benchmarks/*.cu tests/emulator/*.h tests/emulator/*.c*
	$(BIN)/codespell
	$(BIN)/mypy

$(VENV)/.demo: requirements/demo.txt requirements/constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed: make demo PYTHON=...")'
	@echo "Installing torch, transformers and nvidia-modelopt into $(VENV): up to three minutes and 5 GB"
	$(PYTHON) -m venv --upgrade-deps $(VENV)
	$(BIN)/python -m pip install -r requirements/demo.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.demo requirements/test.txt
	@echo "Installing what the tests need into $(VENV): a minute"
	$(BIN)/python -m pip install -r requirements/test.txt
	touch $@

# Packages that the wheels of vLLM and SGLang need are installed once. The environment of a wheel finds them after its own.
.venv-vllm/.test: requirements/vllm.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps -r $<
	touch $@

.venv-%/.test: .venv-vllm/.test requirements/%.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(@D)/lib/python*/site-packages)/shared.pth
	$(@D)/bin/python -m pip install --quiet --no-deps -r requirements/$*.txt
	$(@D)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm* .venv-sglang* $(DEMO) .kernels .device .environments
