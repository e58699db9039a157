"""What becomes of each command and snippet of the pages: run here, run elsewhere, or why not.

A new block in a page fails a test until it has its line here.
"""

from __future__ import annotations

NETWORK = "installs from the network"
MACHINES = "needs several machines"
NODES = "runs until it is stopped; tests/faults/test_hosts.py loses nodes and starts them again"
LIGHTHOUSE = "needs torchft's Lighthouse; tests/live trains on one where torchft is installed"

# Run as they are, in a folder that has `train.py`, benchmarks and examples; in this order.
RUN = [
    "evenstride --version",
    "evenstride doctor",
    "evenstride estimate 1,1,0.4",
    "evenstride estimate 1,1,1,1",
    "evenstride estimate 1,1,0.95",
    "evenstride estimate 1,0.1 --fixed 0.9",
    "evenstride estimate 1,1,1,0.02 --global-batch 128",
    "evenstride simulate --list",
    "evenstride simulate --schema",
    "evenstride simulate cluster.yaml -p uniform,adaptive"
    " --sync 'bsp,bsp-ps,asp,ssp(staleness=3),local-sgd(every=8),delayed'",
    "evenstride top runs/today",
    "evenstride top runs/today --once",
    "evenstride top runs/today --json",
    "evenstride report runs/today",
    "evenstride report runs/uniform runs/adaptive -o compared.html --figures figures",
    "evenstride trace runs/today -o today.json.gz",
]

# Run with less to do: what is replaced by what.
SMALLER = {
    "evenstride compare h10 slow-worker-swap --plot plots": (
        "compare ",
        "compare --seeds 1 ",
    ),
    "evenstride simulate reference --policy adaptive,dynamic-batching --seeds 20 --lag 1,3,8": (
        "--seeds 20",
        "--seeds 1",
    ),
    "evenstride profile --type g4dn.xlarge --out t4.json -- train.py --lr 0.1": (
        "profile ",
        "profile --seconds 2 --parts 1/4,1/2,1 ",
    ),
    "evenstride plan t4.json --epochs 30 --deadline 6h": ("6h", "6h --force --json"),
    "evenstride launch --per-node 2 train.py --lr 0.1": ("launch ", "launch --dry-run "),
    "evenstride launch --nodes 3 --per-node 1 --store 10.0.0.5:29400 train.py": (
        "launch ",
        "launch --dry-run ",
    ),
    "evenstride launch --nodes 1:2 --per-node 1 --store 127.0.0.1:29400 --spot train.py"
    " & node=$!": (
        "launch ",
        "launch --dry-run ",
    ),
    "evenstride lab --speeds 0.8,0.4,0.2 --steps 90 --out runs/mixed -- train.py": (
        "--steps 90",
        "--steps 6 --repeats 1 --no-calibrate",
    ),
    "evenstride launch --nodes 1:4 --per-node 8 --store 10.0.0.5:29400 --spot train.py": (
        "launch ",
        "launch --dry-run ",
    ),
    "EVENSTRIDE_NOTICES=auto,SIGUSR1@20 evenstride launch --per-node 2 train.py": (
        "launch ",
        "launch --dry-run ",
    ),
}

# Run by another test, which has these words in it.
ELSEWHERE = {
    "rm -r runs/saved": ("tests/docs/test_tutorial.py", "rm -r runs/saved"),
    "torchrun --nproc-per-node 3 train.py": (
        "tests/docs/test_tutorial.py",
        "torchrun --nproc-per-node 3 train.py",
    ),
    "EVENSTRIDE_TRACE=runs/today torchrun --nproc-per-node 2 examples/ddp.py": (
        "tests/multiproc/test_examples.py",
        '_run("ddp"',
    ),
    "torchrun --nproc-per-node 2 -m evenstride doctor --bench": (
        "tests/unit/cli/commands/test_doctor_bench.py",
        '"doctor", "--bench"',
    ),
    "evenstride lab --speeds 1,0.5 -- examples/ddp.py": (
        "tests/multiproc/test_lab_modes.py",
        '"lab"',
    ),
    "make demo": ("tests/unit/lab/demo/test_demo_run.py", "run_demo("),
    "evenstride plan --online --workers 1,2,4 --batches 64,256,1024 --epochs 30"
    " -- train.py --lr 0.1": ("tests/multiproc/test_online.py", '"plan", "--online"'),
    "evenstride plan profile.json runs/256 runs/512 runs/1024 --target-loss 0.35": (
        "tests/multiproc/test_reaching.py",
        '"--target-loss"',
    ),
    "evenstride trace runs/today --steps 1000:1200 --with profile.rank0.json"
    " --with profile.rank1.json": ("tests/unit/cli/commands/test_trace.py", '"--with"'),
    "evenstride lab --speeds 0.8,0.4,0.16 --sync 'bsp,asp,ssp(staleness=3)' -- examples/ddp.py": (
        "tests/multiproc/test_lab_modes.py",
        '"--sync"',
    ),
    "evenstride lab --speeds 1,0.5,0.25 -- train.py": (
        "tests/multiproc/test_lab_modes.py",
        '"lab"',
    ),
    "python -m examples.ions.run FOLDER": ("tests/unit/examples/test_ions_run.py", "runs.main()"),
    "python -m examples.ions.run FOLDER --trace aws-08-03-2023/us-west-2c_v100_1 --tick 3": (
        "tests/unit/examples/test_ions_run.py",
        "replay",
    ),
}

# Not run, and why.
NOT_RUN = {
    "pip install .": NETWORK,
    "pip install . --extra-index-url https://download.pytorch.org/whl/cpu": NETWORK,
    "make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu": NETWORK,
    "torchrun --nnodes 3 --nproc-per-node 1 --rdzv-backend c10d"
    " --rdzv-endpoint 10.0.0.5:29400 --rdzv-id check -m evenstride doctor": MACHINES,
    "EVENSTRIDE_TRACE=runs/today torchrun --nnodes 3 --nproc-per-node 1 --rdzv-backend c10d"
    " --rdzv-endpoint 10.0.0.5:29400 --rdzv-id train train.py": MACHINES,
    "evenstride launch --store-only --store 127.0.0.1:29400": NODES,
    "kill -KILL $node $(pgrep -P $node)": NODES,
    "kill -TERM $node": NODES,
    "pip install 'evenstride[plan]'": NETWORK,
    "pip install torchft": NETWORK,
    "torchft_lighthouse --min_replicas 2 --join_timeout_ms 10000 --heartbeat_timeout_ms 2000": (
        LIGHTHOUSE
    ),
    "TORCHFT_LIGHTHOUSE=http://10.0.0.5:29510 REPLICA_GROUP_ID=a python train.py": LIGHTHOUSE,
    "make test": "runs these tests",
    "torchrun --nproc-per-node 2 train.py": "needs two GPUs",
    "evenstride compare --real --speeds 1,0.5,0.2": "takes minutes; it is the demo and the lab",
    "evenstride launch --store-only --store 10.0.0.5:29400": MACHINES,
    "python benchmarks/soak.py --kills 100": "takes minutes; tests/faults has the same losses",
    "PYTHONPATH=src python benchmarks/gpu.py --out runs/gpu.json": "needs a GPU",
    "python -m examples.ions.run FOLDER --jobs 40 --ions 40 --replicas 16 --sweeps 40"
    " --trace aws-08-03-2023/us-west-2c_v100_1 --slots 3 --tick 3 --lease 12 --ranks 2": (
        "takes minutes; the shorter form on the same page is run"
    ),
}

# Python: pages whose snippets another test runs, with words of that test; by page, or by snippet.
SNIPPETS_ELSEWHERE = {
    "claims": ("tests/house/test_documents.py", "claims.md"),
    "simulate": ("tests/unit/sim/test_pages.py", "snippet("),
    "two-unequal-gpus": ("tests/docs/test_tutorial.py", "train.py"),
    "torchft: import torch, evenstride": ("tests/live/training.py", "LiveStride("),
    "metrics: stride = evenstride.Stride(": ("tests/multiproc/test_telling.py", "prometheus"),
    "find-the-slow-worker: import torch.distributed as dist": (
        "tests/multiproc/profiled.py",
        "profile(",
    ),
    "ions: while training:": ("tests/multiproc/test_ions.py", "feed"),
    "lightning: class Data(L.LightningDataModule):": (
        "tests/multiproc/recipes.py",
        "LightningDataModule",
    ),
    "transformers: from evenstride.integrations.transformers import EvenTrainerMixin": (
        "tests/integrations/trainer_uses.py",
        "class EvenSFT(EvenTrainerMixin",
    ),
    "transformers: EvenTrainer(..., "
    'weight_fn=lambda batch: class_weights[batch["labels"]].sum())': (
        "tests/integrations/trainer_cases.py",
        "weight_fn",
    ),
}
SNIPPETS_NOT_RUN = {
    "catalogue: from datetime import date#2": "asks for prices over the network",
    'two-gpus: local_rank = int(os.environ["LOCAL_RANK"])': "needs two GPUs",
}
# Snippets that a rank of these tests cannot run word for word: what is replaced by what.
SNIPPETS_CHANGED = {
    "accelerate: loader = stride.loader(val, train=False)               # not prepared either": (
        "(right, count)",
        "(right, total)",
    ),
    'two-gpus: torch.distributed.init_process_group("gloo")              # serves both kinds': (
        'torch.distributed.init_process_group("gloo")',
        "pass",
    ),
}
