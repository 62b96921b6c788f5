# `make` alone lists the targets. An active environment with torch and Detectron2 is used as it is;
# otherwise everything happens in .venv.
ENVIRONMENT := $(shell sh tools/environment.sh)
BIN := $(ENVIRONMENT)/bin

.DEFAULT_GOAL := help
.PHONY: help setup test test-slow faults faults-long lint format demo ablation real bench doctor clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## create or update the environment, compile the operators
	@sh tools/setup.sh

test: lint ## set up, check style and types, run the tests
	$(BIN)/python -m pytest -n auto --dist worksteal

test-slow: setup ## the tests that take minutes
	$(BIN)/python -m pytest -m slow --timeout 3600

faults: setup ## break runs in every way, about half an hour: docs/reliability.md
	$(BIN)/python -W ignore -m faults --minutes 15

faults-long: setup ## the same with ten times the faults: hours
	$(BIN)/python -W ignore -m faults --size long --minutes 180

lint: setup ## check style and types
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

format: setup ## put the code in style
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

demo: setup ## the main job on the embedded data set: under ten minutes on two cores
	$(BIN)/cldetr demo

# All methods in three orders, those that are compared in five; --table-only prints what all of them gave. Both
# scenarios have the runs in one folder, so that they share first phases. AT_ONCE=2 runs two at a time.
ABLATION = $(BIN)/cldetr sweep --share-first $(if $(AT_ONCE),--parallel $(AT_ONCE)) --set SCENARIO.ORDER seed LOG_PERIOD 100 REPORT False
ABLATION_7_3 = $(ABLATION) SCENARIO.NAME 7+3 --out output/ablation --tables output/ablation/7+3
ABLATION_7_1_1_1 = $(ABLATION) SCENARIO.NAME 7+1x3 --out output/ablation --tables output/ablation/7+1x3
COMPARED = ablation ablation_recommended ablation_dkd ablation_completion
ablation: setup ## methods compared on the embedded data set, three to five orders: hours, resumable
	$(BIN)/cldetr shapes --out datasets/shapes
	$(ABLATION_7_3) $(COMPARED) --seeds 0 1 2 3 4
	$(ABLATION_7_3) ablation_joint --table ablation --seeds 0 1 2
	$(ABLATION_7_1_1_1) $(COMPARED) --seeds 0 1 2 3 4
	$(ABLATION_7_1_1_1) ablation_joint_4_phases --table ablation --seeds 0 1 2
	$(ABLATION_7_3) ablation_joint --table ablation --seeds 0 1 2 3 4 --table-only
	$(ABLATION_7_1_1_1) ablation_joint_4_phases --table ablation --seeds 0 1 2 3 4 --table-only

# WEIGHTS is a file of MobileNetV2's ImageNet weights where torchvision's cannot be downloaded
# (tools/mobilenet_v2_weights.py).
PRETRAINED = output/real/pretrain/phase1/train/model.pth
REAL = $(BIN)/cldetr sweep --share-first --set LOG_PERIOD 50 REPORT False MODEL.WEIGHTS $(PRETRAINED)
CARDS = $(REAL) SCENARIO.NAME 3+3 DATASETS.TRAIN "['voc:$(DATA)/cards_320/trainval']" \
	DATASETS.TEST "['voc:$(DATA)/cards_320/test']" --out output/real/cards
AQUARIUM = $(REAL) DATASETS.TRAIN "['yolo:$(DATA)/aquarium_320/data.yaml/train']" \
	DATASETS.TEST "['yolo:$(DATA)/aquarium_320/data.yaml/val', 'yolo:$(DATA)/aquarium_320/data.yaml/test']"
AQUARIUM_4_3 = $(AQUARIUM) SCENARIO.NAME 4+3 --out output/real/aquarium
AQUARIUM_3_2_2 = $(AQUARIUM) SCENARIO.NAME 3+2x2 --out output/real/aquarium_3_phases
real: setup ## experiments on photographs, DATA=FOLDER with cards_320 and aquarium_320: hours, resumable
	@test -d "$(DATA)" || { echo "give the folder of cards_320 and aquarium_320: make real DATA=DIR" >&2; exit 2; }
	$(MAKE) $(PRETRAINED)
	$(CARDS) --table photographs --seeds 0 1 2
	$(AQUARIUM_4_3) photographs_finetune photographs_recommended --seeds 0 1 2 3 4
	$(AQUARIUM_4_3) --table photographs --seeds 0 1 2
	$(AQUARIUM_3_2_2) photographs photographs_finetune photographs_recommended --seeds 0 1 2
	$(AQUARIUM_3_2_2) --table photographs --seeds 0
	$(AQUARIUM_4_3) --table photographs --seeds 0 1 2 3 4 --table-only
	$(AQUARIUM_3_2_2) --table photographs --seeds 0 1 2 --table-only

$(PRETRAINED): # the transformer learns to find shapes before it sees photographs
	$(BIN)/cldetr shapes --size 192 --smallest 0.05 --most-objects 16 --out datasets/shapes_192
	$(BIN)/cldetr configs photographs_pretrain --write output/real/pretrain.yaml
	$(BIN)/python train_net.py --config-file output/real/pretrain.yaml \
		$$([ -e output/real/pretrain/identity.json ] && echo --resume) OUTPUT_DIR output/real/pretrain \
		LOG_PERIOD 50 REPORT False $(if $(WEIGHTS),MODEL.WEIGHTS $(abspath $(WEIGHTS)))

bench: setup ## the benchmarks, as the table of docs/performance.md: half an hour on two free cores
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/table.py

doctor: setup ## tell what works on this machine
	$(BIN)/cldetr doctor

clean: ## remove caches and builds; keeps .venv, datasets/ and output/
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .cldetr_cache
	rm -rf projects/CLDETR/cldetr.egg-info projects/CLDETR/cldetr/layers/_lib
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(ENVIRONMENT)/.cldetr-setup
