"""What routing by chunks is compared with: each replica in turn."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class RoundRobinRouter(RequestRouter):
    """Sends request n to replica n modulo their number, and to those after it if it is full."""

    def initialize_state(self, **options: Any) -> None:
        """Called by Ray Serve before the first request."""
        self._turn = 0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The candidates in turn, each in a rank of its own."""
        in_order = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        first, self._turn = self._turn % len(in_order), self._turn + 1
        return [[replica] for replica in in_order[first:] + in_order[:first]]
