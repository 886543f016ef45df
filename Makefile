# make demo    train a small model on this machine's Python sources and generate from it
# make test    check the code and run the tests, about 9 minutes on two cores
#
# Either sets up what it needs in .venv first, once, and again after a change of the package.
# PYTHON=... names the interpreter to use, 3.10 or newer.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$$p" && exit; done)
VENV ?= .venv
VENV_NEWEST ?= .venv-newest
VENV_VLLM ?= .venv-vllm
VENV_WHEELS ?= .venv-wheels
VENV_SITE ?= .venv-site
VENV_SPACE ?= .venv-space
NEWEST_TORCH ?= torch
DEMO ?= outputs/demo
CONVERT_DEMO ?= outputs/convert_demo
SPACE ?= outputs/space
PAGE ?= outputs/browser
PAGE_PORT ?= 8000

IN_VENV = PATH="$(abspath $(VENV))/bin:$$PATH"
# Directories too: their time changes when a file is added or removed.
SOURCES = setup.py setup.cfg pyproject.toml constraints.txt MANIFEST.in $(shell \
	find csrc src \( -name __pycache__ -o -name '*.egg-info' \) -prune -o ! -name '*.so' -print)

# All of the CPU's kernels, which the tests compare; a plain `pip install .` compiles this machine's.
export HF_LINEAR_ATTENTION_CPU_INSTRUCTION_SETS ?= all

.PHONY: help demo convert-demo space browser test test-all test-newest test-vllm test-space bench compare instructions sanitize soak gpu-check \
	arm-check cross-check wheels site check format clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed '/^$$/q'
	@echo "make convert-demo   train a small Llama, make it linear, and say what that cost, under 6 minutes"
	@echo "make space   a page on which a softmax and a linear model race, and digits are painted"
	@echo "make browser   the same race without Python: a static page with models as ONNX graphs"
	@echo "make test-all   all tests: those of make test, and then what it leaves, 40 minutes more"
	@echo "make test-space   test these pages in a browser, Chromium or Chrome, in about a minute"
	@echo "make test-newest   run the tests that matter with the newest Transformers, PyTorch and their kin"
	@echo "make test-vllm   run the tests with vLLM, under 10 minutes, in an environment of their own"
	@echo "make bench   measure: a short set of benchmarks, about 10 minutes"
	@echo "make compare OLD=a.whl NEW=b.whl   two versions of the package, side by side"
	@echo "make instructions OLD=a.whl NEW=b.whl   how many instructions each takes, under valgrind"
	@echo "make sanitize   look for memory errors and races in the kernels, under 20 minutes"
	@echo "make soak   serve a small model to 64 clients, with what goes wrong, for 20 minutes"
	@echo "make gpu-check   check the CUDA kernels on the GPU here and measure them, under 10 minutes"
	@echo "make arm-check   run the kernels for ARM in an emulator, on what the ops' tests compute"
	@echo "make cross-check   compile the kernels for macOS and Windows; none of it runs"
	@echo "make wheels   build the wheels of a release into dist/, for x86-64 and ARM, under 10 minutes"
	@echo "make site   build the documentation as a site, in build/site"
	@echo "make check   only check the code: format, lint, types"
	@echo "make format  format the code"
	@echo "make clean   remove what was built; .venv and outputs stay"

TRAIN_DEMO = examples/train_causal_lm.py --max_train_bytes 3000000

# On a busy machine, threads that spin while they wait make so small a model several times slower.
demo: export OMP_WAIT_POLICY = passive
demo: $(VENV)/installed
	rm -rf $(DEMO)
	$(IN_VENV) python $(TRAIN_DEMO) --output_dir $(DEMO) $(DEMO_FLAGS)
	$(IN_VENV) python examples/generate.py $(DEMO)

# Models that are there are not trained again.
space: export OMP_WAIT_POLICY = passive
space: $(VENV_SPACE)/installed $(DEMO)/metrics.json $(SPACE)/softmax/metrics.json \
		$(SPACE)/digits/config.json
	$(VENV_SPACE)/bin/python examples/space/app.py --linear $(DEMO) --softmax $(SPACE)/softmax \
		--digits $(SPACE)/digits $(SPACE_FLAGS)

$(DEMO)/metrics.json: | $(VENV_SPACE)/installed
	$(VENV_SPACE)/bin/python $(TRAIN_DEMO) --output_dir $(@D) $(DEMO_FLAGS)

$(SPACE)/softmax/metrics.json: | $(VENV_SPACE)/installed
	$(VENV_SPACE)/bin/python $(TRAIN_DEMO) --preset softmax --output_dir $(@D) $(DEMO_FLAGS)

$(SPACE)/digits/config.json: | $(VENV_SPACE)/installed
	$(VENV_SPACE)/bin/python examples/train_digits.py --output_dir $(@D)

# A static page, which any server can serve.
browser: $(PAGE)/models/linear/config.json $(PAGE)/models/softmax/config.json $(PAGE)/lib
	cp examples/browser/*.* $(PAGE)
	(sleep 1; $(VENV_SPACE)/bin/python -m webbrowser http://127.0.0.1:$(PAGE_PORT)) &
	$(VENV_SPACE)/bin/python -m http.server --bind 127.0.0.1 --directory $(PAGE) $(PAGE_PORT)

$(PAGE)/models/linear/config.json: $(DEMO)/metrics.json
$(PAGE)/models/softmax/config.json: $(SPACE)/softmax/metrics.json
$(PAGE)/models/%/config.json: | $(VENV_SPACE)/installed
	rm -rf $(@D)
	$(VENV_SPACE)/bin/python -m hf_linear_attention export $(<D) $(@D)

LIBRARIES = $(addprefix build/browser/node_modules/,$(addprefix onnxruntime-web/dist/, \
	ort.wasm.min.mjs ort-wasm-simd-threaded.mjs ort-wasm-simd-threaded.wasm) \
	@huggingface/tokenizers/dist/tokenizers.min.mjs)

$(PAGE)/lib: examples/browser/package-lock.json
	@command -v npm >/dev/null || { echo 'npm is needed; on Debian and Ubuntu: apt install npm' >&2; exit 1; }
	mkdir -p build/browser
	cp examples/browser/package*.json build/browser
	npm ci --prefix build/browser --ignore-scripts
	mkdir -p $@
	cp $(LIBRARIES) $@
	@touch $@

convert-demo: export OMP_WAIT_POLICY = passive
convert-demo: $(VENV)/installed
	rm -rf $(CONVERT_DEMO)
	$(IN_VENV) python examples/train_causal_lm.py --preset llama --output_dir $(CONVERT_DEMO)/original \
		--max_train_bytes 1000000 --recall_share 0.2 $(CONVERT_DEMO_FLAGS)
	$(IN_VENV) python examples/convert.py --model $(CONVERT_DEMO)/original \
		--output_dir $(CONVERT_DEMO)/linear --report --overrides '{"window_size": 32}' \
		--max_train_bytes 1000000 --recall_share 0.2 \
		--transfer_tokens 20000 --distill_tokens 40000 $(CONVERT_DEMO_FLAGS)

PYTEST = OMP_NUM_THREADS=1 python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: check $(VENV)/clients
	$(IN_VENV) $(PYTEST) --tier test $(TEST_FLAGS)

test-all: test
	$(IN_VENV) $(PYTEST) --tier rest $(TEST_FLAGS)

# What a new release of Transformers, PyTorch, PEFT, TRL or torchao has changed for us before.
RELEASE_TESTS = $(addprefix tests/, cache clients upstream generation model serving)

# Whatever pip gives today, in an environment of its own, and not what constraints.txt names: remove
# that to get what came since. NEWEST_TORCH=torch==2.13.0 names a PyTorch, where pip's is too large.
test-newest: $(VENV_NEWEST)/installed
	PATH="$(abspath $(VENV_NEWEST))/bin:$$PATH" $(PYTEST) $(RELEASE_TESTS) $(TEST_FLAGS)

# The files are named, for a run of all tests leaves this folder out.
test-vllm: $(VENV_VLLM)/installed
	OMP_NUM_THREADS=1 $(VENV_VLLM)/bin/python -m pytest tests/with_vllm/test_*.py $(TEST_FLAGS)

# As above.
test-space: $(VENV_SPACE)/installed $(PAGE)/lib
	$(VENV_SPACE)/bin/python -m pytest tests/in_browser/test_*.py $(TEST_FLAGS)

bench: $(VENV)/installed
	$(IN_VENV) python benchmarks/bench_ops.py $(BENCH_FLAGS)
	$(IN_VENV) python benchmarks/bench_products.py $(BENCH_FLAGS)
	$(IN_VENV) python benchmarks/bench_decode.py $(BENCH_FLAGS)
	$(IN_VENV) python benchmarks/bench_training.py $(BENCH_FLAGS)
	$(IN_VENV) python benchmarks/bench_upstream.py $(BENCH_FLAGS)
	$(IN_VENV) python benchmarks/bench_rg_lru.py $(BENCH_FLAGS)

compare: $(VENV)/installed
	$(IN_VENV) python benchmarks/compare_wheels.py $(OLD) $(NEW) $(COMPARE_FLAGS)

instructions: $(VENV)/installed
	$(IN_VENV) python scripts/instruction_counts.py $(OLD) $(NEW) $(INSTRUCTIONS_FLAGS)

sanitize: $(VENV)/clients
	$(IN_VENV) python scripts/sanitize.py $(SANITIZE_FLAGS)

soak: $(VENV)/clients
	$(IN_VENV) python scripts/soak.py $(SOAK_FLAGS)

# Fetches nothing: it takes the Python of $(VENV), or else PYTHON, with the torch that it has.
gpu-check:
	$(or $(wildcard $(VENV)/bin/python),$(PYTHON)) scripts/gpu_check.py $(GPU_CHECK_FLAGS)

arm-check: $(VENV)/clients
	$(IN_VENV) python scripts/arm_check.py $(ARM_CHECK_FLAGS)

# Needs no torch, so it has an environment of its own, which is soon there.
wheels: $(VENV_WHEELS)/installed
	$(VENV_WHEELS)/bin/python scripts/build_wheels.py $(WHEELS_FLAGS)

cross-check: $(VENV_WHEELS)/installed
	$(VENV_WHEELS)/bin/python scripts/cross_check.py $(CROSS_CHECK_FLAGS)

# Signatures and docstrings are read, not imported, so that it needs no torch, either.
site: $(VENV_SITE)/installed
	$(VENV_SITE)/bin/python scripts/site_source.py
	NO_MKDOCS_2_WARNING=1 $(VENV_SITE)/bin/python -m mkdocs build --strict --quiet

check: $(VENV)/installed
	$(IN_VENV) scripts/check.sh

format: $(VENV)/installed
	$(IN_VENV) scripts/check.sh --fix

clean:
	rm -rf build dist src/*.egg-info src/hf_linear_attention/*.so .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# The package is built and installed as a user would get it, not as a link to src. What setuptools
# copied to build/lib before is removed, lest it install modules that are no longer there.
$(VENV)/installed: $(VENV)/created $(SOURCES)
	rm -rf build/lib*
	$(VENV)/bin/python -m pip install --disable-pip-version-check \
		--constraint constraints.txt '.[train,test,dev]'
	@$(VENV)/bin/python -m hf_linear_attention
	@touch $@

# Programs that the tests run models with; the demo starts sooner, and says less, without them.
$(VENV)/clients: $(VENV)/installed
	$(VENV)/bin/python -m pip install --disable-pip-version-check \
		--constraint constraints.txt 'hf-linear-attention[clients,experiments,onnx]'
	@touch $@

$(VENV_NEWEST)/installed: $(VENV_NEWEST)/created $(SOURCES)
	rm -rf build/lib*
	$(VENV_NEWEST)/bin/python -m pip install --disable-pip-version-check \
		--upgrade --upgrade-strategy eager '$(NEWEST_TORCH)' '.[train,test,clients]'
	@$(VENV_NEWEST)/bin/python -m hf_linear_attention
	@touch $@

# All that vLLM needs there is in one list: without --no-deps pip would add programs for images and
# sound. PyTorch comes first, with what the build of it that pip finds here needs.
$(VENV_VLLM)/installed: $(VENV_VLLM)/created tests/with_vllm/requirements.txt $(SOURCES)
	rm -rf build/lib*
	$(VENV_VLLM)/bin/python -m pip install --disable-pip-version-check \
		"$$(grep '^torch==' tests/with_vllm/requirements.txt)"
	$(VENV_VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps \
		--requirement tests/with_vllm/requirements.txt
	$(VENV_VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps .
	@touch $@

$(VENV_WHEELS)/installed: $(VENV_WHEELS)/created constraints.txt
	$(VENV_WHEELS)/bin/python -m pip install --disable-pip-version-check \
		--constraint constraints.txt auditwheel lief setuptools ziglang
	@touch $@

$(VENV_SITE)/installed: $(VENV_SITE)/created constraints.txt
	$(VENV_SITE)/bin/python -m pip install --disable-pip-version-check \
		--constraint constraints.txt mkdocs-material 'mkdocstrings[python]'
	@touch $@

$(VENV_SPACE)/installed: $(VENV_SPACE)/created $(SOURCES)
	rm -rf build/lib*
	$(VENV_SPACE)/bin/python -m pip install --disable-pip-version-check \
		--constraint constraints.txt '.[train,space,onnx]' pytest selenium
	@touch $@

$(VENV)/created $(VENV_NEWEST)/created $(VENV_VLLM)/created $(VENV_WHEELS)/created \
		$(VENV_SITE)/created $(VENV_SPACE)/created:
	@[ -n '$(PYTHON)' ] || { \
		echo 'No Python 3.10 or newer found. Install one, or name it: make PYTHON=/path/to/python3' >&2; \
		exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo 'Python 3.10 or newer is needed. Name one: make PYTHON=/path/to/python3' >&2; \
		exit 1; }
	@echo 'Setting up $(@D): its downloads are large and take a few minutes, the first time only.'
	@[ -x '$(@D)/bin/python' ] || '$(PYTHON)' -m venv '$(@D)' || { \
		rm -rf '$(@D)'; \
		echo 'No virtual environment; on Debian and Ubuntu: apt install python3-venv' >&2; \
		exit 1; }
	@touch $@
