"""`python -m nsa.train` on a Ray cluster: `python examples/ray_train.py CONFIG --workers 16 --gpu`.

Each Ray Train worker starts the command as its own rank, so that the loop, the watchdog and the
files are those of torchrun's. The run's folder must be one that all hosts see.

Needs ray[train]; what follows the options is `python -m nsa.train`'s own, such as `--resume`.
"""

import argparse
import json
import logging
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import ray
import ray.train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer


def rank_of_the_job(options: dict[str, object]) -> None:
    """One rank, from its start to its end, in a Ray Train worker."""
    place = ray.train.get_context()
    rank = place.get_world_rank()
    with socket.socket() as free:  # the port of Ray's own group is taken
        free.bind(("", 0))
        meeting = (ray.util.get_node_ip_address(), free.getsockname()[1])
    address, port = broadcast_from_rank_zero(meeting)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": place.get_world_size(),
        "LOCAL_RANK": place.get_local_rank(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    out = Path(str(options["out"]))
    command = [sys.executable, "-m", "nsa.train", str(options["config"]), "--out", str(out)]
    command += ["--job", str(options["job"])]
    command += [str(word) for word in options["rest"]]  # type: ignore[attr-defined]
    given = ["env", *(f"{name}={value}" for name, value in variables.items())]
    code = subprocess.run([*given, *command], check=False).returncode
    if code:
        raise RuntimeError(
            f"rank {rank} ended with exit code {code}; wanted 0; read {out}/log/rank{rank}.jsonl"
            f" and {out}/halt.json, then give the same command with --resume"
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="a YAML file that all hosts see, or @NAME of a shipped one")
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("--gpu", action="store_true", help="a GPU a rank, else a CPU")
    parser.add_argument("--out", default="runs/train", help="a folder that all hosts see")
    parser.add_argument("--address", help="of the cluster; else the one that Ray finds, or a new")
    given, rest = parser.parse_known_args(argv)
    ray.init(address=given.address, logging_level=logging.ERROR)
    named = given.config.startswith("@")
    options = {
        "config": given.config if named else str(Path(given.config).resolve()),
        "out": str(Path(given.out).resolve()),
        "job": uuid.uuid4().hex,
        "rest": rest,
    }
    trainer = TorchTrainer(
        rank_of_the_job,
        train_loop_config=options,
        # Ray's own group is for its workers, which compute nothing
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=given.workers, use_gpu=given.gpu),
        run_config=ray.train.RunConfig(storage_path=f"{options['out']}-ray"),
    )
    try:
        trainer.fit()
    finally:
        ray.shutdown()
    log = Path(options["out"], "log", "rank0.jsonl").read_text(encoding="utf-8")
    last = [one for one in map(json.loads, log.splitlines()) if "loss_nats" in one][-1]
    print(f"step {last['step']}: loss {last['loss_nats']:.4f} nats")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
