"""The commands of the README, as a user types them: in a process of their own, from any folder, with and without their inputs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.builtin import build_tiny

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = [str(Path(sys.executable).with_name("torchrun"))]


def run(command, cwd, **environment):
    """Runs without a network, byte code or W&B account; returns (exit status, stdout, stderr, seconds)."""
    quiet = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "120"}
    began = time.monotonic()
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **quiet, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr, time.monotonic() - began


def everything_under(*folders):
    return {path for folder in folders for path in folder.rglob("*")}


@pytest.mark.parametrize("launcher", [[sys.executable], TORCHRUN], ids=["python", "torchrun"])
@pytest.mark.parametrize("here", [True, False], ids=["in the repository", "elsewhere"])
def test_training_70b_without_its_inputs_names_the_next_commands_and_nothing_above_hides_it(launcher, here, tmp_path):
    cwd = ROOT if here else tmp_path
    script = Path("launch/train.py") if here else ROOT / "launch" / "train.py"
    status, out, err, _ = run([*launcher, script, "conf=llama70b_mtp", f"data.store={tmp_path}/none", f"run_dir={tmp_path}/run"], cwd)
    assert status == 2
    assert out == ""
    assert "error: missing: " in err and f"launch/capture.py conf=llama70b_mtp data.store={tmp_path}/none" in err
    assert err.count("error: ") == 1 and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_dry_run_ends_well_and_fast(tmp_path):
    status, out, err, seconds = run([sys.executable, ROOT / "launch" / "train.py", "conf=llama70b_mtp", "dry_run=true"], tmp_path)
    assert (status, "plan of llama70b_mtp" in out) == (0, True), err
    assert seconds < 60  # about five on an idle machine; the suite may share its cores
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", ["train", "respond", "capture", "export", "evaluate", "latency", "run", "plan", "masks", "trees"])
def test_every_script_refuses_a_mistake_in_one_line(stage, tmp_path):
    status, _, err, _ = run([sys.executable, ROOT / "launch" / f"{stage}.py", "conf=tiny_mtp", "train.stepz=1"], tmp_path)
    assert status == 2 and err.startswith("error: ") and "stepz" in err and err.count("\n") == 1, err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["plan=true", "plan=false"])
def test_all_stages_do_without_the_plan_as_training_does(word, tmp_path):
    status, out, err, _ = run([sys.executable, ROOT / "launch" / "run.py", "conf=tiny_mtp", "dry_run=true", word], tmp_path)
    assert (status, "plan of tiny_mtp" in out) == (0, word == "plan=true"), err


def test_help_lists_confs_and_groups(tmp_path):
    status, out, _, _ = run([sys.executable, ROOT / "launch" / "train.py", "--help"], tmp_path)
    assert status == 0 and all(word in out for word in ("conf=<name>", "tiny_mtp", "eagle3", "stage2"))


def test_plan_for_a_number_of_gpus(tmp_path):
    status, out, _, _ = run([sys.executable, ROOT / "launch" / "plan.py", "conf=llama8b_eagle3", "gpus=8"], tmp_path)
    assert status == 0 and "on 8 GPUs (H100)" in out and "next: python" in out
    assert "Verdict: it " in out and " on 8 x H100; " in out.partition("Verdict")[2]
    status, _, err, _ = run([sys.executable, ROOT / "launch" / "plan.py", "conf=llama8b_eagle3", "gpus=many"], tmp_path)
    assert status == 2 and "gpus=many" in err


def folders(tmp_path):
    return [f"run_dir={tmp_path}/run", f"data.store={tmp_path}/store", f"data.responses={tmp_path}/responses"]


def test_run_stops_at_the_first_stage_that_fails_with_its_status(tmp_path):
    words = ["conf=tiny_mtp", *folders(tmp_path), f"target.model={build_tiny(tmp_path / 'target')}", "data.prompts=[nowhere.jsonl]"]
    words += ["data.limit=1", "data.heldout_limit=1"]
    status, out, err, _ = run([sys.executable, ROOT / "launch" / "run.py", *words], tmp_path)
    assert status == 2 and "nowhere.jsonl" in err and "Traceback" not in err
    assert "respond: exit status 2" in out and "== capture" not in out and out.count("plan of tiny_mtp") == 1


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["tiny_eagle3", "tiny_mtp"])
def test_the_whole_way_of_a_tiny_run_and_again(conf, tmp_path):
    """Prompts to report through the real engine; a second call finds all of it done and changes no hidden state and no weight."""
    command = [sys.executable, ROOT / "launch" / "run.py", f"conf={conf}", *folders(tmp_path)]
    status, out, err, first = run(command, ROOT)
    assert status == 0 and out.count(f"plan of {conf}") == 1, out[-3000:] + err[-3000:]
    assert (tmp_path / "run" / "eval" / "report.json").is_file() and (tmp_path / "run" / "eval" / "report.html").is_file()
    kept = [path for path in everything_under(tmp_path) if path.suffix == ".safetensors" and "export" not in path.parts]
    times = {path: path.stat().st_mtime_ns for path in kept}
    status, out, err, second = run(command, ROOT)
    assert status == 0, out[-3000:] + err[-3000:]
    assert times == {path: path.stat().st_mtime_ns for path in kept}
    assert "all 20 steps are done" in out and "going on" not in out
