"""Other people's scripts train on what is built: TRL's own command, as it comes."""

import subprocess
import sys
from pathlib import Path

from tiny_models import arguments, talker_folder

from data_builders import build


def test_trls_own_sft_command_trains_on_the_pairs(tmp_path):
    """The folder is given as a dataset: its card says which files hold the pairs."""
    model = talker_folder(tmp_path / "tiny", seed=4, end_weight=2.0)
    assert build.main(arguments(model, tmp_path / "run", "data.answers=corpus", "data.limit=8")) == 0
    command = [Path(sys.executable).parent / "trl", "sft", "--model_name_or_path", model]
    command += ["--dataset_name", tmp_path / "run" / "data", "--output_dir", tmp_path / "out", "--max_steps", "2"]
    command += ["--per_device_train_batch_size", "2", "--use_cpu", "--report_to", "none", "--logging_steps", "1"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "'loss'" in done.stdout + done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()
