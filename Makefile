# On a new machine: `make demo` or `make test`. Both install what they need below .venvs/,
# given python3 (3.10 or newer) with venv, and network or a pip configuration that stands for it.
#
#   make demo     two real vLLM servers share one small device, and you see memory move
#   make test     `quick`, the protocol's every state, faults and kills, and what real engines show: their own sizing
#                 code beside ours, servers of vLLM and of SGLang that share devices
#   make engines  all tests that start real vLLM engines
#   make faults   kills, stops, damage, full disks, other users, random steps on real memory (minutes);
#                 `faults-core` all of them, with fewer random ones
#   make soak     two real servers under bursts, kills and restarts for an hour (SOAK_MINUTES)
#   make test-timed   those that hold a bar of seconds: on a machine with nothing else to do
#   make test-sglang  those that start SGLang, in an environment of its own; `sglang-core` the first of them
#   make verify   the whole correctness matrix against the native engines, reports in verify-out
#   make verify-core  the most telling cases of it for vLLM, some eight minutes on two busy cores
#   make test-web the page in a browser, the API against its description, two engines under both
#   make quick    format, lint, types, floors, and the tests that need no engine

PYTHON ?= python3
VLLM ?= 0.30.0
SGLANG ?= 0.5.20

DEV := .venvs/dev
ENGINE := .venvs/vllm-$(VLLM)
OTHER := .venvs/sglang-$(SGLANG)
WEB := .venvs/web
PYTEST := -p no:cacheprovider --timeout 120
SGLANG_PYTEST = SGLANG_USE_CPU_ENGINE=1 KV_VLLM_PYTHON=$(CURDIR)/$(ENGINE)/bin/python \
	$(OTHER)/bin/python -m pytest $(PYTEST) -W default --timeout 900
SGLANG_CORE := $(addprefix tests/engines/sglang_engine/test_,slots.py retraction.py own.py pools.py \
	sglang_refusals.py sglang_tokens.py sglang_sharing.py)
SGLANG_REST := refused_by_name
VERIFY_CORE := 'model/llama/*' 'elastic/*-wide' 'limit/*' 'order/*'
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test model test-timed test-sglang sglang-core test-web verify verify-core quick core sizing-sglang engines faults faults-core soak format clean

demo: $(ENGINE)/.done
	$(ENGINE)/bin/kvtide demo --out demo-out

# vLLM, and SGLang where its environment is there; `make $(OTHER)/.done` makes it.
verify: $(ENGINE)/.done
	@failed=0; other=; test ! -f $(OTHER)/.done || other="--other sglang=$(OTHER)/bin/python"; \
	$(ENGINE)/bin/kvtide verify --out verify-out/vllm $$other || failed=1; \
	test -z "$$other" || SGLANG_USE_CPU_ENGINE=1 $(OTHER)/bin/kvtide verify --engine sglang \
		--other vllm=$(ENGINE)/bin/python --out verify-out/sglang || failed=1; \
	exit $$failed

verify-core: $(ENGINE)/.done
	$(ENGINE)/bin/kvtide verify --out verify-out/core $(addprefix --case ,$(VERIFY_CORE))

test: quick model faults-core core sizing-sglang sglang-core verify-core

# The same examples every time; pytest alone, or `make faults`, looks for others.
quick: $(DEV)/.done
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/ruff check .
	$(DEV)/bin/mypy
	$(DEV)/bin/lint-imports --no-cache
	$(DEV)/bin/python -m pytest $(PYTEST) --hypothesis-profile ci -m "not torch and not engine" \
		tests/unit tests/properties

# The protocol's every reachable state.
model: $(DEV)/.done
	$(DEV)/bin/python -m pytest $(PYTEST) tests/model

# What may happen to processes, files and kernels around it. KVTIDE_INTERNAL_SCHEDULES and _STEPS make more of it.
# `faults-core` has fewer random kills, and all 50,000 random steps: some seven minutes on two cores.
faults-core: export KVTIDE_INTERNAL_SCHEDULES ?= 500
faults-core: export KVTIDE_INTERNAL_RANK_KILLS ?= 75
faults faults-core: $(DEV)/.done
	$(DEV)/bin/python -m pytest $(PYTEST) --timeout 900 tests/faults

SOAK_MINUTES ?= 60
soak: $(ENGINE)/.done
	$(ENGINE)/bin/python bench/soak.py --minutes $(SOAK_MINUTES) --out soak.json

# What needs an engine's packages, and two real servers that share a device.
core: $(ENGINE)/.done
	$(ENGINE)/bin/python -m pytest $(PYTEST) -m torch tests/unit tests/properties
	$(ENGINE)/bin/python -m pytest $(PYTEST) --timeout 900 -m "not timed" \
		tests/engines/test_sizing_vllm.py tests/engines/test_sharing.py

# The same plans beside SGLang's own code, in its environment; its modules warn as they load.
sizing-sglang: $(OTHER)/.done
	SGLANG_USE_CPU_ENGINE=1 $(OTHER)/bin/python -m pytest $(PYTEST) -W default --timeout 900 \
		tests/engines/test_sizing_sglang.py

# All that starts vLLM, but for what holds a bar of seconds; each test has a limit of its own.
engines: $(ENGINE)/.done
	$(ENGINE)/bin/python -m pytest $(PYTEST) --timeout 900 -m "not timed" tests/engines

# What must happen within a second: for a machine with nothing else to do.
test-timed: $(ENGINE)/.done $(OTHER)/.done
	$(ENGINE)/bin/python -m pytest $(PYTEST) --timeout 900 -m timed tests/engines
	$(SGLANG_PYTEST) -m timed tests/engines/sglang_engine

# All that starts SGLang, whose own modules warn as they are imported.
test-sglang: $(OTHER)/.done $(ENGINE)/.done
	$(SGLANG_PYTEST) -m "not timed" tests/engines/test_sizing_sglang.py tests/engines/sglang_engine

# All of them but the policies and what is refused on servers, some fifteen minutes on two cores.
sglang-core: $(OTHER)/.done $(ENGINE)/.done
	$(SGLANG_PYTEST) -m "not timed" -k "not ($(SGLANG_REST))" $(SGLANG_CORE)

# A browser and what it needs are installed with apt-get, where this runs as root.
test-web: $(WEB)/.done $(ENGINE)/.done
	KV_VLLM_PYTHON=$(CURDIR)/$(ENGINE)/bin/python \
		$(WEB)/bin/python -m pytest $(PYTEST) -W default --timeout 600 tests/web

format: $(DEV)/.done
	$(DEV)/bin/ruff format .
	$(DEV)/bin/ruff check --fix .

$(DEV)/.done: pyproject.toml
	test -x $(DEV)/bin/python || $(PYTHON) -m venv $(DEV)
	$(DEV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

$(ENGINE)/.done: pyproject.toml scripts/install_vllm.sh
	PYTHON=$(PYTHON) scripts/install_vllm.sh $(VLLM) $(ENGINE)
	touch $@

$(OTHER)/.done: pyproject.toml scripts/install_sglang.sh
	PYTHON=$(PYTHON) scripts/install_sglang.sh $(SGLANG) $(OTHER)
	touch $@

$(WEB)/.done: pyproject.toml scripts/install_web.sh
	PYTHON=$(PYTHON) scripts/install_web.sh $(WEB)
	touch $@

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-out verify-out
