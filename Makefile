# Verbs of the stack. Anything longer than a command is a script in scripts/.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VARIANT ?= cpu
RECIPE  ?= data/recipes/smoke.toml
export RECIPE VARIANT
PYTHON  ?= python3
VENV    := .venv
RUN     := $(VENV)/bin/python -m
COMPOSE := docker compose
# A project of its own, so that the end of a run does not end it.
DASH := TAG=$(or $(TAG),$(VARIANT)) docker compose --file compose.dash.yaml --profile dash
DASH_URL = http://127.0.0.1:$(or $(DASH_PORT),7860)/?project=opencode-rl
export COMPOSE_FILE ?= compose.yaml$(if $(filter cpu,$(VARIANT)),:compose.cpu.yaml)$(if $(HF_TOKEN),:compose.hub.yaml)

##@ Run
.PHONY: prepare smoke learn train resume eval status dash traces doctor logs down purge
prepare: $(VENV)/ready ## Bring what RECIPE needs here and lock it: model commit and weights, tasks, sandbox base
	$(RUN) scripts.prepare_run

smoke: $(VENV)/ready images ## The whole loop on this machine's CPU: train, evaluate, summary
	RECIPE=data/recipes/smoke.toml $(RUN) scripts.run --variant cpu

learn: $(VENV)/ready images ## A reward curve that rises, on a CPU: SEEDS=1,2,3; CONTROL=shuffled-rewards|no-learning-rate|no-sync
	$(RUN) scripts.learn

train: $(VENV)/ready images ## Train RECIPE with VARIANT=cpu|cuda, evaluate, summary
	$(RUN) scripts.run --variant $(VARIANT)

eval: $(VENV)/ready images ## Base against CKPT=2|best|final|base|hub:repo@rev of the newest run or RUN_NAME; N= TASKS= GREEDY=1
	$(RUN) scripts.eval

status: $(VENV)/ready ## Live view of the newest run, or of RUN_NAME; ONCE=1, JSON=1
	$(RUN) scripts.status $(if $(ONCE),--once) $(if $(JSON),--json)

dash: images ## Dashboard of all runs (trackio), for this machine only; DASH_PORT=7860
	$(DASH) up --detach --wait dash
	@echo "dashboard: $(DASH_URL)"
	@if [ -n "$${DISPLAY:-}$${WAYLAND_DISPLAY:-}" ]; then $(PYTHON) -m webbrowser -t "$(DASH_URL)" >/dev/null; fi

traces: $(VENV)/ready ## Rollouts of the newest run, or RUN_NAME: list and one HTML file; STEP= TASK= SORT=worst|longest|failed N= ID= TOKENS=1
	$(RUN) scripts.traces

doctor: $(VENV)/ready ## Every precondition of RECIPE with VARIANT, a line each; JSON=1
	$(RUN) scripts.doctor $(if $(JSON),--json)

logs: ## Follow the logs of all services
	$(COMPOSE) --profile '*' logs --follow --tail 50

resume: $(VENV)/ready images ## Go on with the newest run, or RUN_NAME, from its newest checkpoint
	$(RUN) scripts.run --variant $(VARIANT) --resume

down: $(VENV)/ready ## Stop everything; runs stay
	$(COMPOSE) --profile '*' stop
	$(RUN) scripts.sweep
	$(COMPOSE) --profile '*' down --remove-orphans
	$(DASH) down

purge: down ## Delete runs and images of this project (asks)
	scripts/purge.sh

##@ Hugging Face Jobs
.PHONY: push hf-job hf-eval-job hf-logs hf-status hf-stop job-smoke
# A Job runs the full recipe unless another is named.
HF := RECIPE=$(if $(filter file,$(origin RECIPE)),data/recipes/lfm2.5-2.6b.toml,$(RECIPE)) $(RUN) scripts.hf_job
push: $(VENV)/ready ## Build and push all images to REGISTRY=host/owner, by digest (VARIANT=cuda for Jobs)
	$(RUN) scripts.push

hf-job: $(VENV)/ready ## Train in a Job: ADAPTER_REPO=, MAX_STEPS=20 first; DRY_RUN=1 prints the payload, YES=1 asks nothing
	$(HF) train

hf-eval-job: $(VENV)/ready ## Evaluate every checkpoint of ADAPTER_REPO in a Job of its own
	$(HF) eval

hf-logs: $(VENV)/ready ## Follow the newest training Job, or RUN_NAME's, or JOB=id
	$(HF) logs

hf-status: $(VENV)/ready ## Jobs of this project, or of RUN_NAME
	$(HF) status

hf-stop: $(VENV)/ready ## Cancel the Jobs and sandboxes of RUN_NAME, or JOB=id (asks)
	$(HF) stop

job-smoke: $(VENV)/ready docker ## The smoke recipe in the job image: one container, the Jobs' own supervisord configuration
	scripts/build_images.sh cpu default job
	RECIPE=data/recipes/smoke.toml $(RUN) scripts.job_smoke

##@ Build
.PHONY: docker images lock
docker: ## Use the running Docker engine, or install and start one (Debian, root)
	scripts/ensure_docker.sh

images: docker ## Build all images of VARIANT
	scripts/build_images.sh $(VARIANT)

lock: ## Renew hashed locks and base digests
	scripts/lock.sh

##@ Check
.PHONY: test test-fast test-contract test-stack test-gpu test-job check fidelity chaos
test: $(VENV)/ready images ## All tests: unit, contract, stack
	scripts/test.sh unit contract stack

test-fast: $(VENV)/ready ## The unit tests: no network, no Docker
	scripts/test.sh unit

test-contract: $(VENV)/ready images ## The seams between the parts, inside the images
	scripts/test.sh contract

test-stack: $(VENV)/ready images ## Real compose, real sandboxes
	scripts/test.sh stack

test-gpu: $(VENV)/ready docker ## On a GPU, in the trainer image of VARIANT=cuda (not part of `test`)
	scripts/test.sh gpu

test-job: $(VENV)/ready images ## The job image: the smoke recipe in one container (minutes; not part of `test`)
	scripts/test.sh job

fidelity: $(VENV)/ready images ## Is what is trained exactly what is sampled? One table, on a policy of its own
	$(RUN) scripts.fidelity --variant $(VARIANT)

chaos: $(VENV)/ready images ## Kill every part of the CPU stack in every phase (ONLY=policy,sync MINUTES=8: a piece of it)
	$(RUN) scripts.chaos $(if $(ONLY),--only $(ONLY)) $(if $(MINUTES),--minutes $(MINUTES))

check: $(VENV)/ready ## Lint, types, compose files, recipes
	scripts/check.sh

$(VENV)/ready: tests/requirements.txt
	PYTHON=$(PYTHON) scripts/make_venv.sh $(VENV)

.PHONY: help
help: ## Show this list
	@awk 'BEGIN{FS=":.*## "} /^##@/{printf "\n%s\n",substr($$0,5)} /^[a-z-]+:.*## /{printf "  %-14s %s\n",$$1,$$2}' $(MAKEFILE_LIST)
