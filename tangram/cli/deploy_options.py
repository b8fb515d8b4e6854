"""The options of `tangram deploy` that concern its cluster."""

from __future__ import annotations

from typing import Annotated

from tangram.cli.checks import within
from tangram.cli.options import Panel, option
from tangram.limits import SERVER_BOUNDS

Replicas = Annotated[
    int,
    option(
        Panel.replicas,
        "replicas, each with an engine of its own",
        callback=within(SERVER_BOUNDS["replicas"]),
    ),
]
Autoscaling = Annotated[
    str | None,
    option(
        Panel.replicas,
        """fields of Ray's AutoscalingConfig instead of --replicas: JSON like '{"min_replicas": """
        """1, "max_replicas": 4}'""",
        default="as many replicas as --replicas says",
    ),
]
Address = Annotated[
    str | None,
    option(
        Panel.replicas,
        "join the Ray cluster at this address: auto for the one on this machine, or HOST:PORT",
        default="start one on this machine",
    ),
]
Detach = Annotated[
    bool,
    option(
        Panel.replicas,
        "with --address: end when requests are answered, and leave the replicas to the cluster",
        "--detach",
    ),
]
AppName = Annotated[str, option(Panel.replicas, "name of the application in Ray Serve")]
CpusPerReplica = Annotated[
    float | None,
    option(
        Panel.replicas,
        "CPUs that Ray reserves for a replica",
        default="--threads, else 1, times --tensor-parallel-size",
        callback=within(SERVER_BOUNDS["cpus_per_replica"]),
    ),
]
GpusPerReplica = Annotated[
    float | None,
    option(
        Panel.replicas,
        "GPUs that Ray reserves for a replica: --tensor-parallel-size, or a part of one GPU",
        default="one for each rank if the cluster has some and --device is not cpu",
        callback=within(SERVER_BOUNDS["gpus_per_replica"]),
    ),
]
ReportEvery = Annotated[
    float,
    option(
        Panel.replicas,
        "seconds between two reports of a replica to the router",
        callback=within(SERVER_BOUNDS["report_every_s"]),
    ),
]
