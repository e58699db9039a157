"""The batch script of a plan. Slurm itself reads and runs one in tests/integrations."""

import subprocess

from evenstride.errors import ConfigError
from evenstride.planner.search.training_forecast import ClusterChoice
from evenstride.planner.slurm_file import slurm_file
from tests.messages import raises_message
from tests.unit.planner.kinds import kind

MIXED = ClusterChoice(
    (kind("p3.2xlarge", accelerators="V100:1"), kind("g5.12xlarge", workers=4)), (1, 2), 256
)
EXPECTED = """\
#!/bin/bash
# 1 x p3.2xlarge + 2 x g5.12xlarge. Each node has its type as a feature (Feature= in slurm.conf).
#SBATCH --job-name=digits --requeue --open-mode=append --signal=B:USR1@60
#SBATCH --nodes=1 --ntasks-per-node=1 --exclusive --constraint=p3.2xlarge --gpus-per-node=1
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive --constraint=g5.12xlarge
export EVENSTRIDE_NOTICES=auto,SIGUSR1@30
export EVENSTRIDE_EPOCHS=5
# The address of the first machine, as Slurm itself reaches it.
head=$(srun --het-group=0 --nodes=1 --ntasks=1 printenv SLURM_LAUNCH_NODE_IPADDR)
again=
trap 'again=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
srun --kill-on-bad-exit=0 --wait=0 --het-group=0 evenstride launch --nodes 3 --per-node 1 \
--store "$head:29400" --id "$SLURM_JOB_ID" 'a b.py' --text 'it'"'"'s' \\
  : --het-group=1 evenstride launch --nodes 3 --per-node 4 \
--store "$head:29400" --id "$SLURM_JOB_ID" 'a b.py' --text 'it'"'"'s' &
step=$!
wait $step; status=$?
if [ "$again" ]; then
  wait $step
  scontrol requeue "$SLURM_JOB_ID" && sleep 300  # until Slurm ends this script
fi
exit $status
"""
COMMAND = ("a b.py", "--text", "it's")


def test_two_types_are_a_heterogeneous_job() -> None:
    text = slurm_file(MIXED, COMMAND, {"EVENSTRIDE_EPOCHS": "5"}, name="digits")

    assert text == EXPECTED
    subprocess.run(["bash", "-n", "-c", text], check=True, timeout=20)


def test_one_type_is_a_plain_job() -> None:
    text = slurm_file(ClusterChoice((kind("a"),), (2,), 256), ["t.py"])

    assert "het" not in text
    assert "\nhead=$(srun --nodes=1 " in text


def test_with_spot_machines_a_job_outlives_one() -> None:
    choice = ClusterChoice((kind("a"), kind("b", losses_per_h=0.1)), (1, 2), 256)
    text = slurm_file(choice, ["t.py"])

    assert text.count(" --no-kill\n") == 2
    assert "--wait=0 --no-kill --het-group=0 " in text
    assert text.count("--nodes 1:3 --per-node 1 --store") == 2
    assert "--no-kill" not in EXPECTED


def test_a_type_that_cannot_be_a_feature_is_refused() -> None:
    with raises_message(ConfigError, "'my node|x'"):
        slurm_file(ClusterChoice((kind("my node|x"),), (2,), 256), ["t.py"])
