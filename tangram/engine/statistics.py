"""What an engine uses and has done: the figures of one sequence, and `EngineStats` of them all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tangram.cache.accounting import PageStates
from tangram.cache.disk import DiskTier
from tangram.engine.admission import Admission
from tangram.engine.drafts.speculation import Speculation
from tangram.engine.passes.meters import Meters
from tangram.engine.schedule.scheduler import Scheduler
from tangram.engine.schedule.token_sequence import TokenSequence
from tangram.metrics import EngineStats
from tangram.types import LossReason, Usage


@dataclass(frozen=True, eq=False)
class StatsReader:
    """Reads the parts of one engine. `admission` knows the sizes of its pool."""

    admission: Admission
    scheduler: Scheduler
    meters: Meters
    speculation: Speculation | None

    def usage(self, sequence: TokenSequence) -> Usage:
        """The KV use of one sequence now. For a preempted one, as it was when last computed.

        Tokens count up to the one before the newest: accepted drafts do as they become known.
        """
        layout, (sealed, raw) = sequence.keys.retention.layout, sequence.count_state()
        entries = layout.count_uncompressed_entries(sealed * layout.chunk_tokens + raw)
        return Usage(
            sequence.prompt_tokens,
            sequence.read_tokens,
            sequence.cached_tokens or 0,
            layout.count_held_pages(sealed, raw) * self.admission.page_bytes,
            entries * self.admission.entry_bytes,
            None if self.speculation is None else self.speculation.usage(sequence),
        )

    def read(self) -> EngineStats:
        """One reading of them all."""
        admission, scheduler, meters = self.admission, self.scheduler, self.meters
        cache, counters, speculation = scheduler.cache, scheduler.counters, self.speculation
        layout, pages = admission.retentions[0].layout, PageStates.of(cache)
        total, longest = admission.total_pages, admission.max_model_len
        uses = [self.usage(sequence) for sequence in scheduler.running]
        holders = cache.sequences.values()
        stats = EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.fetching),
            pages_total=total,
            pages_held=pages.held,
            pages_cached=pages.cached,
            pages_free=pages.free,
            pages_promised=pages.promised,
            # With those of tokens whose values are still to come.
            slots_held=sum(holder.booked_pages for holder in holders) * layout.page_slots,
            slots_used=sum(
                holder.layout.count_held_entries(len(holder.spans), holder.raw_tokens)
                for holder in holders
            ),
            chunk_tokens=layout.chunk_tokens,
            capacity_tokens=layout.tokens_in(total, longest),
            capacity_uncompressed_tokens=admission.uncompressed.tokens_in(total, longest),
            cache_dtype=admission.cache_dtype,
            page_bytes=admission.page_bytes,
            kv_token_bytes=admission.kv_token_bytes,
            kv_bytes_held=sum(use.kv_bytes for use in uses),
            kv_bytes_uncompressed=sum(use.kv_bytes_uncompressed for use in uses),
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            computed_prompt_tokens=counters.computed_prompt_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            steps=counters.steps,
            sealed_chunks=counters.sealed_chunks,
            host_pages_total=cache.host.total,
            host_pages_used=cache.host.used,
            restored_tokens=cache.host.restored_tokens,
            host_page_bytes=admission.host_page_bytes,
            host_bytes_out=cache.host.pages_out * admission.host_page_bytes,
            host_bytes_in=cache.host.pages_in * admission.host_page_bytes,
            dropped_spans=cache.host.dropped,
            step_s=meters.step_s,
            device_s=meters.device_s,
            sealing_s=meters.sealing.seconds,
            lost_diverged=counters.lost_tokens[LossReason.DIVERGED],
            lost_evicted=counters.lost_tokens[LossReason.EVICTED],
            lost_stateless=counters.lost_tokens[LossReason.STATELESS],
            plans=dict(meters.plans),
            overflow=() if meters.overflow is None else meters.overflow.figures,
            speculation=None if speculation is None else speculation.counters.read(),
        )
        return stats if cache.disk is None else _with_disk(stats, cache.disk)


def _with_disk(stats: EngineStats, disk: DiskTier) -> EngineStats:
    return replace(
        stats,
        disk_spans=disk.store.links,
        disk_bytes=disk.store.used_bytes,
        disk_hits=disk.hits,
        disk_misses=disk.misses,
        disk_corrupt=disk.store.corrupt,
        disk_dropped=disk.dropped,
    )
