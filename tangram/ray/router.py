"""The request router of Ray Serve that asks `tangram.routing` where a request goes.

A handle of the engines' deployment has a router, in the process of the ingress. Ray calls it on one
thread.
"""

from __future__ import annotations

from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tangram.ray.payloads import FactsQuestion, SentRequest
from tangram.ray.reports import read_routing_stats
from tangram.routing.replica_choice import Candidate, LoadCosts, Placement, Router


class ChunkRouter(RequestRouter):
    """Sends a request where it is expected to be answered first, by the chunks that replicas hold.

    In a redeploy there are replicas of two deployments. A `SentRequest` goes to those by whose
    facts it was read, and to others if none of these is left. A `FactsQuestion` waits until half
    of the replicas are of its deployment, since the ingress that asks sends all requests there.
    Other calls go to any replica.
    """

    # A busy replica answers late, and is the right one none the less.
    queue_len_response_deadline_s = 2.0
    max_queue_len_response_deadline_s = 10.0

    def initialize_state(self, **costs: float) -> None:
        """Called by Ray Serve before the first request, with its `request_router_kwargs`.

        They are fields of `LoadCosts`.
        """
        self._policy = Router(LoadCosts(**costs))
        self._names: set[str] = set()
        self._made_s: dict[str, float] = {}
        self._ranked: dict[str, dict[str, Candidate]] = {}
        self._placements: dict[str, Placement] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are, and their newest reports."""
        self._names = {replica.replica_id.unique_id for replica in replicas}
        self._policy.set_replicas(self._names)
        self._made_s = {name: at for name, at in self._made_s.items() if name in self._names}
        for replica in replicas:
            name = replica.replica_id.unique_id
            found = read_routing_stats(replica.routing_stats, self._made_s.get(name))
            if found is not None:
                self._made_s[name], report = found
                self._policy.take_report(name, report)
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The candidates, best first, each in a rank of its own."""
        call = _read_call(pending_request)
        if pending_request is None or call is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        if isinstance(call, FactsQuestion):
            deployed = _select_deployment(candidate_replicas, call.version)
            return [deployed] if 2 * len(deployed) >= len(candidate_replicas) else []
        deployed = _select_deployment(candidate_replicas, call.origin.version)
        by_name = {
            replica.replica_id.unique_id: replica for replica in deployed or candidate_replicas
        }
        ranked = [each for each in self._policy.rank(call.chain) if each.replica in by_name]
        identity = pending_request.metadata.internal_request_id
        self._ranked[identity] = {each.replica: each for each in ranked}
        return [[by_name[each.replica]] for each in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Note that the replica has accepted the request."""
        identity, call = pending_request.metadata.internal_request_id, _read_call(pending_request)
        candidate = self._ranked.pop(identity, {}).get(replica_id.unique_id)
        if not isinstance(call, SentRequest) or candidate is None:
            return
        if candidate.replica in self._names:
            self._placements[identity] = self._policy.begin(candidate, call.chain)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request has ended, in whatever way."""
        placement = self._placements.pop(internal_request_id, None)
        if placement is not None:
            self._policy.end(placement)


def _read_call(pending: PendingRequest | None) -> SentRequest | FactsQuestion | None:
    if pending is None or not pending.args:
        return None
    first = pending.args[0]
    return first if isinstance(first, SentRequest | FactsQuestion) else None


def _select_deployment(replicas: list[RunningReplica], version: str) -> list[RunningReplica]:
    return [replica for replica in replicas if replica.replica_metadata.get("version") == version]
