"""A rehearsal compared with real ranks on a slow link: each rank in a network namespace.

    python benchmarks/rehearsal_link.py --ranks 2 4 --mbit 400

Every rank gets a namespace with one interface, connected to a bridge by a veth pair whose ends are
both limited to the given Mbit/s (a token bucket). The step is recorded in this process, the link is
measured between the ranks, and each strategy is predicted and run, interleaved. Needs
CAP_NET_ADMIN, CAP_SYS_ADMIN, `ip` and `tc`; exits with 77 if they are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rehearsal_check.cases import CheckCase
from rehearsal_check.measure import Samples, run_strategies, series_of
from rehearsal_check.view import Comparison, compare

from stepscope.analysis.rehearsal.recording import Recording
from stepscope.studies.rehearsal.measure import record_step

NOT_PERMITTED = 77
BURST_BYTES = 32 * 1024
"""Burst of the token bucket: a few packets, since otherwise small messages would be free."""
SUBNET = "10.213.77"
SECONDS = 300.0


class NotPermittedError(Exception):
    """Namespaces cannot be created here."""


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise NotPermittedError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def shape(namespace: str, interface: str, mbit: float) -> None:
    arguments = [
        "tc",
        "qdisc",
        "add",
        "dev",
        interface,
        "root",
        "tbf",
        "rate",
        f"{mbit}mbit",
        "burst",
        str(BURST_BYTES),
        "latency",
        "200ms",
    ]
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, *arguments], capture_output=True, text=True, timeout=20
    )
    if done.returncode:
        raise NotPermittedError(f"{' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def namespace(name: str) -> Iterator[str]:
    ip("netns", "add", name)
    try:
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


@contextmanager
def slow_network(ranks: int, mbit: float) -> Iterator[list[str]]:
    """Create the namespaces of the ranks; they and their interfaces are removed afterwards."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NotPermittedError(f"{tool} is not installed")
    prefix = f"stepscope-{os.getpid()}"
    with ExitStack() as stack:
        switch = stack.enter_context(namespace(f"{prefix}-switch"))
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        namespaces = []
        for rank in range(ranks):
            own = stack.enter_context(namespace(f"{prefix}-{rank}"))
            port = f"port{rank}"
            ip(
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "wire",
                "netns",
                own,
            )
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", own, "address", "add", f"{SUBNET}.{rank + 1}/24", "dev", "wire")
            ip("-n", own, "link", "set", "wire", "up")
            ip("-n", own, "link", "set", "lo", "up")
            shape(own, "wire", mbit)
            shape(switch, port, mbit)
            namespaces.append(own)
        yield namespaces


def as_rank(folder: Path) -> None:
    """Entry point of a rank's process."""
    import torch

    from stepscope.parallel import World

    recording, case = pickle.loads((folder / "task").read_bytes())
    torch.set_num_threads(1)
    world = World.from_environment("gloo", "cpu")
    with world.connected(SECONDS):
        samples = run_strategies(world, recording, case)
    (folder / f"result-{world.rank}").write_bytes(pickle.dumps(samples))


def run_on_link(case: CheckCase, mbit: float, recording: Recording) -> list[Samples]:
    ranks = case.ranks
    with tempfile.TemporaryDirectory() as name, slow_network(ranks, mbit) as namespaces:
        folder = Path(name)
        (folder / "task").write_bytes(pickle.dumps((recording, case)))
        started = []
        for rank, own in enumerate(namespaces):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "GLOO_SOCKET_IFNAME": "wire",
                "STEPSCOPE_RENDEZVOUS": f"file://{folder / 'rendezvous'}",
            }
            command = ["ip", "netns", "exec", own, sys.executable, __file__, "--as-rank", name]
            started.append(subprocess.Popen(command, env=os.environ | variables))
        try:
            codes = [process.wait(timeout=SECONDS) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(ranks)]


def case_of(options: argparse.Namespace, ranks: int) -> CheckCase:
    return CheckCase(
        size=options.size,
        table="2025",
        context=options.context,
        batch=options.batch,
        dtype="float32",
        attention="reference",
        compile="no",
        optimizer="torch",
        mode="train-step",
        overrides={"vocab": options.vocab},
        steps=options.steps,
        ranks=ranks,
        bucket_mb=tuple(options.bucket_mb),
        rounds=options.rounds,
        compute="waits",
    )


def record(case: CheckCase) -> Recording:
    import torch

    from stepscope.measure.device import CpuDevice

    torch.set_num_threads(1)
    series, times = record_step(case, CpuDevice(), case.steps, lambda *_: None)
    return Recording.of_samples(series, times)


def comparison_of(case: CheckCase, results: list[Samples], recording: Recording) -> Comparison:
    comparison = compare(recording, series_of(results), case.bucket_mb)
    assert comparison is not None
    return comparison


def facts(
    ranks: int, mbit: float, recording: Recording, comparison: Comparison
) -> dict[str, object]:
    return {
        "ranks": ranks,
        "mbit": mbit,
        "gradient_bytes": recording.gradient_bytes,
        "compute_ms": recording.compute_ms,
        "bytes_per_ms": comparison.channel.line.bytes_per_ms,
        "latency_ms": comparison.channel.line.latency_ms,
        "all_alone_ms": comparison.channel.alone(recording.gradient_bytes),
        "ways": {
            row.strategy: {
                "predicted_ms": row.predicted_ms,
                "measured_ms": row.measured.median,
                "error": row.error,
            }
            for row in comparison.rows
        },
    }


def print_comparison(ranks: int, mbit: float, recording: Recording, comparison: Comparison) -> None:
    link = comparison.channel.line
    print(
        f"{ranks} ranks at {mbit:g} Mbit/s: {recording.compute_ms:.1f} ms of compute,"
        f" {recording.gradient_bytes / 2**20:.1f} MiB of gradients; a reduction takes"
        f" {link.latency_ms:.2f} ms and carries {link.bytes_per_ms / 1e3:.1f} MB/s"
    )
    for row in comparison.rows:
        print(
            f"  {row.strategy:18} predicted {row.predicted_ms:8.1f} ms, measured"
            f" {row.measured.median:8.1f} [{row.measured.low:.1f}, {row.measured.high:.1f}],"
            f" error {row.error:+.1%}"
        )
    print(f"  worst {abs(comparison.worst.error):.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, default=400.0)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        as_rank(options.as_rank)
        return 0
    recording = record(case_of(options, options.ranks[0]))
    for ranks in options.ranks:
        case = case_of(options, ranks)
        try:
            results = run_on_link(case, options.mbit, recording)
        except NotPermittedError as error:
            print(f"network namespaces are not available: {error}", file=sys.stderr)
            return NOT_PERMITTED
        comparison = comparison_of(case, results, recording)
        if options.json:
            print(json.dumps(facts(ranks, options.mbit, recording, comparison)))
        else:
            print_comparison(ranks, options.mbit, recording, comparison)
    return 0


if __name__ == "__main__":
    sys.exit(main())
