"""What becomes of each command and snippet of the pages: run here, run elsewhere, or why not.

A new command or block in a page fails a test until it has its line here. A command within a
sentence needs none if it is a fragment, or if the page is a record of what was done.
"""

from __future__ import annotations

NETWORK = "installs from the network"
MACHINES = "needs several machines"
NODES = "runs until it is stopped; tests/faults/test_hosts.py loses nodes and starts them again"
LIGHTHOUSE = "needs torchft's Lighthouse; tests/live trains on one where torchft is installed"

# Run as they are, in a folder that has `train.py`, benchmarks and examples; in this order.
RUN = [
    "evenstride --version",
    "evenstride --help",
    "evenstride doctor",
    "evenstride estimate 1,1,0.4",
    "evenstride estimate 1,1,1,1",
    "evenstride estimate 1,1,0.95",
    "evenstride estimate 1,0.1 --fixed 0.9",
    "evenstride estimate 1,1,1,0.02 --global-batch 128",
    "evenstride estimate 312,312,121 --global-batch 512 --fixed 0.1",
    "evenstride simulate --list",
    "evenstride simulate --schema",
    "evenstride simulate cluster.yaml -p uniform,adaptive"
    " --sync 'bsp,bsp-ps,asp,ssp(staleness=3),local-sgd(every=8),delayed'",
    "evenstride simulate reference",
    "evenstride simulate reference -p adaptive,my_policy.SlowestToFastest:step=4",
    "evenstride simulate cluster.yaml -p dbs,dynamic-batching:window=5 --json",
    "evenstride simulate slow-worker-swap --policy adaptive --lag 3"
    " --plot docs/images/split-after-a-change.svg",
    "evenstride top runs/today",
    "evenstride top runs/today --once",
    "evenstride top runs/today --json",
    "evenstride top runs/today --once --all",
    "evenstride top runs/demo --json",
    "evenstride grafana -o grafana.json",
    "evenstride report runs/today",
    "evenstride report runs/demo",
    "evenstride report runs/uniform runs/adaptive -o compared.html --figures figures",
    "evenstride trace runs/today -o today.json.gz",
    "evenstride trace runs/today",
    "evenstride trace runs/demo/adaptive.jsonl",
]

ONE_SEED = ("--seeds 20", "--seeds 1")
BRIEFLY = ("compare ", "compare --seeds 1 --steps 60 ")
# The run of the lab has traces of a model; they have three workers.
OF_THE_LAB = (
    "runs/today --as g4dn.xlarge,",
    "runs/mixed/adaptive-1 --force --as g4dn.xlarge,g5.xlarge,",
)
QUICKLY = ("profile ", "profile --seconds 2 --parts 1/4,1/2,1 ")
DRY = ("launch ", "launch --dry-run ")
# Run with less to do: what is replaced by what.
SMALLER = {
    "evenstride simulate h10 -p adaptive,uniform --sync 'bsp,asp,ssp(staleness=3)'": (
        "h10 ",
        "h10 --steps 60 ",
    ),
    "evenstride simulate cluster.yaml -p adaptive,dbs --seeds 20 --lag 1,3,8": ONE_SEED,
    "evenstride simulate reference --policy adaptive,dynamic-batching --seeds 20 --lag 1,3,8": (
        ONE_SEED
    ),
    "evenstride compare h10 slow-worker-swap --plot plots": BRIEFLY,
    "evenstride compare reference h10": BRIEFLY,
    "evenstride compare cluster.yaml --seeds 20 --lag 1,3,8": ONE_SEED,
    "evenstride compare cluster.yaml --policy adaptive,dbs --json": ("--json", "--json --seeds 1"),
    "evenstride profile --type g4dn.xlarge --out t4.json -- train.py --lr 0.1": QUICKLY,
    "evenstride profile --type g5.xlarge -- train.py": QUICKLY,
    "evenstride lab --speeds 1,0.5 --out runs/lab -- train.py": (
        "-- train.py",
        "--steps 6 --repeats 1 --no-calibrate -- train.py",
    ),
    "evenstride profile --seconds 20 --parts 1/4,1/2,1 --out cpu.json -- train.py --lr 0.1": (
        "--seconds 20",
        "--seconds 2",
    ),
    "evenstride plan t4.json --epochs 30 --deadline 6h": ("6h", "6h --force --json"),
    "evenstride plan profile.json --epochs 30": ("30", "30 --force"),
    "evenstride plan profile.json --epochs 30 --explain": ("30", "30 --force"),
    "evenstride plan profile.json --epochs 30 --deadline 6h --catalog prices.csv --spot": (
        "30",
        "30 --force",
    ),
    'evenstride plan t4.json a10g.json --epochs 90 --script "train.py" --kuberay rayjob.yaml': (
        "a10g.json",
        "profile.json --force",
    ),
    'evenstride plan t4.json a10g.json --epochs 90 --budget 40 --sky sky --script "train.py"': (
        "a10g.json",
        "profile.json --force",
    ),
    'evenstride plan t4.json a10g.json --epochs 90 --script "train.py" --write slurm:train.sbatch'
    " --write jobset:train.yaml": ("a10g.json", "profile.json --force"),
    "evenstride plan t4.json a10g.json --epochs 90 --write slurm:train.sbatch": (
        "a10g.json",
        "profile.json --force",
    ),
    "evenstride launch --per-node 2 train.py --lr 0.1": DRY,
    "evenstride launch --per-node 2 -- -m pkg.module --lr 0.1": DRY,
    "evenstride launch --nodes 3 --per-node 1 --store 10.0.0.5:29400 train.py": DRY,
    "evenstride launch --nodes 1:2 --per-node 1 --store 127.0.0.1:29400 --spot train.py"
    " & node=$!": DRY,
    "evenstride launch --nodes 1:4 --store 10.0.0.5:29400 --spot train.py": DRY,
    "evenstride launch --nodes 1:4 --per-node 8 --store 10.0.0.5:29400 --spot train.py": DRY,
    "EVENSTRIDE_NOTICES=auto,SIGUSR1@20 evenstride launch --per-node 2 train.py": DRY,
    "evenstride lab --speeds 0.8,0.4,0.2 --steps 90 --out runs/mixed -- train.py": (
        "--steps 90",
        "--steps 6 --repeats 1 --no-calibrate",
    ),
    "evenstride plan runs/today --as g4dn.xlarge,g5.xlarge --epochs 30": OF_THE_LAB,
    "evenstride plan runs/today --as g4dn.xlarge,g5.xlarge --trained 256:12 --trained 1024:17": (
        OF_THE_LAB
    ),
    "python -m examples.ions.simulate --length 4 --salt 0.5 --charge -0.01 --method dynamics": (
        "simulate ",
        "simulate --sweeps 5 --replicas 4 ",
    ),
}

# Files that some of these read, and the command that writes them.
MADE_BY = {
    "t4.json": "evenstride profile --type g4dn.xlarge --out t4.json -- train.py --lr 0.1",
    "profile.json": "evenstride profile --type g5.xlarge -- train.py",
    "runs/mixed/": "evenstride lab --speeds 0.8,0.4,0.2 --steps 90 --out runs/mixed -- train.py",
}

TUTORIAL = "tests/docs/test_tutorial.py"
LAB = ("tests/multiproc/test_lab_modes.py", '"lab"')
LAB_MODES = ("tests/multiproc/test_lab_modes.py", '"--sync"')
LAB_OPTIONS = ("tests/unit/cli/test_outcome.py", '"--change", "60:1,0.4"')
DEMO = ("tests/unit/lab/demo/test_demo_run.py", "run_demo(")
RAY = ("tests/integrations/test_ray.py", '"examples/ray_train.py"')
TENSORFLOW = ("tests/integrations/test_tensorflow.py", "examples/tensorflow_loop.py")
TRANSFORMERS = ("tests/integrations/trainer_uses.py", "transformers_trainer.main(")
ONLINE = ("tests/multiproc/test_online.py", '"plan", "--online"')
WITH = ("tests/unit/cli/commands/test_trace.py", '"--with"')
ACCELERATE = ("tests/integrations/accelerate_states.py", "accelerate_loop")
LIGHTNING = (
    "tests/integrations/test_lightning_examples.py",
    '"lightning_trainer", "lightning_fabric"',
)
FABRIC = TRAINER = LIGHTNING
LAUNCHERS = "tests/integrations/test_launchers.py"
# Run by another test, which has these words in it.
ELSEWHERE = {
    'evenstride plan --script "train.py --lr 0.1" --epochs 30': (
        "tests/integrations/test_plan_starts.py",
        "train.py --lr 0.1",
    ),
    ".venv/bin/python tools/check_fsdp.py wheels/*.whl": (
        "tests/unit/runtime/engines/test_fsdp_source.py",
        "check_fsdp.main(",
    ),
    "rm -r runs/saved": (TUTORIAL, "rm -r runs/saved"),
    "torchrun --nproc-per-node 3 train.py": (TUTORIAL, "torchrun --nproc-per-node 3 train.py"),
    "torchrun --nproc-per-node 1 train.py": ("tests/multiproc/test_examples.py", "split=(4096,)"),
    "torchrun --nproc-per-node 2 examples/ddp.py": (
        "tests/multiproc/test_examples.py",
        '_run("ddp"',
    ),
    "EVENSTRIDE_TRACE=runs/today torchrun --nproc-per-node 2 examples/ddp.py": (
        "tests/multiproc/test_examples.py",
        '_run("ddp"',
    ),
    "torchrun --nproc-per-node 2 examples/transformers_trainer.py --cpu": TRANSFORMERS,
    "python examples/ray_train.py --workers 2": RAY,
    "torchrun --nproc-per-node 2 examples/tensorflow_loop.py": TENSORFLOW,
    "torchrun --nproc-per-node 2 examples/tensorflow_loop.py --checkpoint saved": TENSORFLOW,
    "accelerate launch --multi_gpu --num_processes 2 --num_machines 1"
    " examples/accelerate_loop.py --cpu": (LAUNCHERS, "def accelerate("),
    "ray job submit --working-dir examples --runtime-env-json"
    ' \'{"env_vars": {"EVENSTRIDE_GLOBAL_BATCH": "96"}}\' -- python ray_train.py': (
        LAUNCHERS,
        '"EVENSTRIDE_GLOBAL_BATCH": "96"',
    ),
    "torchrun --nproc-per-node 2 examples/accelerate_loop.py --cpu": ACCELERATE,
    "torchrun --nproc-per-node 2 examples/accelerate_loop.py --cpu --checkpoint saved": ACCELERATE,
    "torchrun --nproc-per-node 2 examples/lightning_fabric.py --accelerator cpu": FABRIC,
    "torchrun --nproc-per-node 2 examples/lightning_trainer.py --accelerator cpu": TRAINER,
    "torchrun --nproc-per-node 2 examples/lightning_trainer.py --accelerator cpu"
    " --checkpoint saved": TRAINER,
    "torchrun --nproc-per-node 2 -m evenstride doctor": (
        "tests/unit/lab/doctor/test_checkup.py",
        'launched(["-c", DOCTOR]',
    ),
    "torchrun --nproc-per-node 2 -m evenstride doctor --bench": (
        "tests/unit/cli/commands/test_doctor_bench.py",
        '"doctor", "--bench"',
    ),
    "make demo": DEMO,
    "evenstride demo --out runs/demo": DEMO,
    "evenstride demo --speeds 1,0.3 --json": DEMO,
    "evenstride demo --data data/fashion-mnist": DEMO,
    "evenstride lab --speeds 1,0.5 -- train.py": LAB,
    "evenstride lab --speeds 1,0.5 -- examples/ddp.py": LAB,
    "evenstride lab --speeds 1,0.5,0.25 -- train.py": LAB,
    "evenstride lab --speeds 1,0.5,0.25 -- examples/ddp.py": LAB,
    "evenstride lab --speeds 0.8,0.4,0.16 --sync 'bsp,asp,ssp(staleness=3)'"
    " -- examples/ddp.py": LAB_MODES,
    "evenstride lab --speeds 1,0.5,0.2 --sync 'bsp,asp,ssp(staleness=3)'"
    " -- examples/ddp.py": LAB_MODES,
    "evenstride lab --speeds 1,0.5 --policies dynamic-batching,adaptive"
    " -- train.py --lr 0.1": LAB_OPTIONS,
    "evenstride lab --speeds 1,1 --change 60:1,0.4 --policies adaptive --no-calibrate"
    " -- train.py": LAB_OPTIONS,
    "evenstride plan --online --workers 1,2,4 --batches 64,256,1024 --epochs 30"
    " -- train.py --lr 0.1": ONLINE,
    "evenstride plan --online --workers 1,2,4 --batches 64,256 --epochs 30"
    " -- train.py --lr 0.1": ONLINE,
    "evenstride plan --online --workers 1,2 --batches 128,512,2048 --epochs 60"
    " -- examples/online.py": ("tests/multiproc/test_online.py", '"examples" / "online.py"'),
    "evenstride plan runs/1x64 runs/1x256 runs/4x64 runs/4x256 --as box --full --target-loss 0.4": (
        "tests/unit/cli/commands/test_plan.py",
        '"--full"',
    ),
    "evenstride plan profile.json runs/256 runs/512 runs/1024 --target-loss 0.35": (
        "tests/multiproc/test_reaching.py",
        '"--target-loss"',
    ),
    "evenstride trace runs/today --steps 1000:1200 --with profile.rank0.json"
    " --with profile.rank1.json": WITH,
    "evenstride trace runs/today --steps 1000:1200 --with rank0.json --with rank1.json": WITH,
    "python benchmarks/picture.py runs/demo docs/images/before-after.svg": (
        "tests/unit/benchmarks/test_picture.py",
        "picture.main()",
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
    "pip download torch==2.15.0 --no-deps --dest wheels": NETWORK,
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
    "pip install 'evenstride[wandb]'": NETWORK,
    "pip install 'evenstride[mlflow]'": NETWORK,
    "pip install 'evenstride[live]'": NETWORK,
    "pip install 'evenstride[accelerate,demo]'": NETWORK,
    "pip install 'evenstride[lightning,demo]'": NETWORK,
    "evenstride lab --speeds 1,0.5,0.25 -- examples/ray_train.py": "needs Ray and three workers",
    "evenstride lab --speeds 1,0.5,0.25 -- examples/tensorflow_loop.py": (
        "needs TensorFlow and three workers"
    ),
    "pip install 'evenstride[tensorflow,demo]'": NETWORK,
    "torchft_lighthouse --min_replicas 2 --join_timeout_ms 10000 --heartbeat_timeout_ms 2000": (
        LIGHTHOUSE
    ),
    "TORCHFT_LIGHTHOUSE=http://10.0.0.5:29510 REPLICA_GROUP_ID=a python train.py": LIGHTHOUSE,
    "make test": "runs these tests",
    "torchrun --nproc-per-node 2 train.py": "needs two GPUs",
    "evenstride compare --real --speeds 1,0.5,0.2": "takes minutes; it is the demo and the lab",
    "evenstride compare --real --speeds 1,0.5 -- train.py --lr 0.1": (
        "takes minutes; it is the demo and the lab"
    ),
    "python benchmarks/open_batch.py --rounds 1 --batches 32,512 --speeds 1,0.6": (
        "takes minutes and needs data sets; tests/multiproc/test_open_batch.py has such batches"
    ),
    "evenstride launch --store-only --store 10.0.0.5:29400": MACHINES,
    "python benchmarks/soak.py --kills 100": "takes minutes; tests/faults has the same losses",
    "python benchmarks/peers/compare_peers.py --prepare": NETWORK,
    "python benchmarks/peers/compare_peers.py --minutes 40": (
        "takes minutes and needs other systems; tests/unit/benchmarks tests what it computes"
    ),
    "python benchmarks/peers/compare_peers.py --page": (
        "overwrites the page; a test in tests/unit/benchmarks compares it with the results"
    ),
    "PYTHONPATH=src python benchmarks/gpu.py --out runs/gpu.json": "needs a GPU",
    "python -m examples.ions.run FOLDER --jobs 40 --ions 40 --replicas 16 --sweeps 40"
    " --trace aws-08-03-2023/us-west-2c_v100_1 --slots 3 --tick 3 --lease 12 --ranks 2": (
        "takes minutes; the shorter form on the same page is run"
    ),
}

KNOWN = [*RUN, *SMALLER, *ELSEWHERE, *NOT_RUN]

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
    "accelerate: accelerator = EvenAccelerator(global_batch=512)": (
        "tests/integrations/accelerate_programs.py",
        "global_batch",
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
    "data-set: loader = stride.loader(": ("tests/multiproc/sequences.py", "bucketed"),
    "iterations: batches = iter(stride.loader(get_batch, max_micro_batch=12))": (
        "tests/multiproc/windowed.py",
        "max_micro_batch",
    ),
    "ray: TorchTrainer(": ("tests/integrations/ray_cluster.py", "TorchTrainer("),
    "tensorflow: from evenstride import Stream": (
        "tests/integrations/tensorflow_local.py",
        "pipeline.shuffle(50, seed=epoch)",
    ),
    "tensorflow: state = tf.train.Checkpoint(model=model, optimizer=optimizer, "
    "position=stride.position)": ("examples/tensorflow_loop.py", "tf.train.CheckpointManager("),
    'streaming-data: data = load_dataset("json", data_files=files, split="train", '
    "streaming=True).shuffle(seed=3)": ("tests/integrations/digit_streams.py", "streaming=True"),
    "streaming-data: loader = stride.loader(evenstride.Stream(data, transform=tokenize), "
    "num_workers=4)": ("tests/integrations/digit_streams.py", "Stream("),
    "streaming-data: from evenstride.integrations.streaming_data import webdataset_shards": (
        "tests/integrations/digit_streams.py",
        "webdataset_shards",
    ),
    "streaming-data: def read(epoch, skip):": ("tests/integrations/digit_streams.py", "detshuffle"),
}
SNIPPETS_NOT_RUN = {
    'two-gpus: torch.distributed.init_process_group("gloo")              # serves both kinds': (
        "reads LOCAL_RANK, which a launcher sets"
    ),
    "catalogue: from datetime import date#2": "asks for prices over the network",
    'trackers: run = wandb.init(project="my-project")': (
        "needs W&B; tests/integrations/test_trackers.py has both orders"
    ),
    'two-gpus: local_rank = int(os.environ["LOCAL_RANK"])': "needs two GPUs",
}
# Snippets that a rank of these tests cannot run word for word: what is replaced by what.
SNIPPETS_CHANGED: dict[str, tuple[str, str]] = {}
