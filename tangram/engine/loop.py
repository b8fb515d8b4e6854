"""The engine's loop: schedule, plan, run, commit, emit.

This is the only module that knows both the scheduler and the runner. On a GPU a step is launched
before the tokens of the step before are read: the device takes them from its own memory. Scheduling
needs only counts, which are known. When tokens are read, an end token or a stop string may end a
completion whose next token is already being computed. That token is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from tangram.cache.accounting import check_accounting
from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.cache.step import Step
from tangram.config import EngineConfig
from tangram.engine.admission import Admission
from tangram.engine.completion import Answers, Completion, Flight, refuse
from tangram.engine.drafts.speculation import Speculation
from tangram.engine.drafts.verification import Verifier
from tangram.engine.intake import Intake
from tangram.engine.mailbox import Job, Mailbox
from tangram.engine.outbox import Outbox
from tangram.engine.passes.forward_pass import PlannedStep
from tangram.engine.passes.runner import Runner
from tangram.engine.ranks.ranks import Ranks
from tangram.engine.sampling.sampler import BROKEN_LOGITS
from tangram.engine.schedule.scheduler import Scheduler
from tangram.engine.statistics import StatsReader
from tangram.engine.text.codec import TextCodec
from tangram.engine.text.grammar import GrammarCompiler
from tangram.engine.watching import Watching
from tangram.errors import EngineError, IntegrityError
from tangram.metrics import EngineStats
from tangram.model.load import LoadedModel
from tangram.types import ChosenToken, FinishReason, Geometry, Request, SamplingValues
from tangram.watch import Observer, Watched

STATS_EVERY_S = 0.05

_log = logging.getLogger("tangram")


@dataclass(frozen=True)
class Parts:
    """What an engine is made of."""

    config: EngineConfig
    loaded: LoadedModel
    admission: Admission
    scheduler: Scheduler
    runner: Runner
    speculation: Speculation | None


class Engine:
    """Serves requests one step at a time: call `step` yourself, or `start` a thread that does.

    `submit`, `abort`, `stats` and `waiting` may be called from any thread and do not wait for a
    step. They leave jobs for the stepping thread and read what it has published. Engines are built
    by `tangram.engine.setup.build.build_engine`. With `ahead` a step is launched before the tokens
    of the step before are read. On several devices it leads the other `ranks`, and ends them.
    """

    def __init__(self, parts: Parts, ranks: Ranks | None = None) -> None:
        self.config, self._ranks = parts.config, ranks
        self._loaded, self.admission = parts.loaded, parts.admission
        self._scheduler, self._runner = parts.scheduler, parts.runner
        self._speculation = speculation = parts.speculation
        loaded, device = self._loaded, self._loaded.device
        self._verifier = (
            None
            if speculation is None
            else Verifier(self._scheduler, self._runner, speculation, device)
        )
        self.codec = TextCodec(
            loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            tool_format=self.config.tool_format,
            thinking_format=self.config.thinking_format,
        )
        self.healthy = True
        self.ahead = device.type != "cpu"
        self.grammars = GrammarCompiler(
            loaded.tokenizer, self.geometry.vocab_size, self.codec.eos_token_ids
        )
        self._answers = Answers(
            self.codec,
            vocab_size=self.geometry.vocab_size,
            device=device,
            seed=self.config.seed,
            defaults=self.sampling,
        )
        self._flight: Flight | None = None
        self._outbox = Outbox(self._publish_stats)
        most = self.config.max_num_seqs
        self._mail = Mailbox(Intake(self.config.max_queue, most), most)
        self._statistics = StatsReader(
            self.admission, self._scheduler, self._runner.meters, speculation
        )
        self._stats, self._stats_s = self._statistics.read(), -STATS_EVERY_S
        self._thread: threading.Thread | None = None
        self._checked = False
        self._watching: Watching | None = None
        self._scheduled: Step | None = None
        self._followers: list[Callable[[], None]] = []

    @property
    def geometry(self) -> Geometry:
        """The model's attention shape."""
        return self._loaded.geometry

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._loaded.device

    @property
    def layout(self) -> Layout:
        """The layout of requests that name no ρ."""
        return self.admission.retentions[0].layout

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and answer, of one sequence."""
        return self.admission.max_model_len

    @property
    def sampling(self) -> SamplingValues:
        """What holds where a request states nothing."""
        return self.admission.sampling

    # -- from any thread ---------------------------------------------------------------------------

    def submit(self, *requests: Request) -> None:
        """Queue `requests`, all or none; their events come through `on_event` of each.

        Raises `RequestError` at once if one is malformed or can never fit, or if they have more
        completions than may ever run and wait. Raises `OverloadError` if `max_queue` completions
        wait. Then nothing is queued. Raises `EngineError` once the engine's thread has ended.
        """
        jobs: list[Job] = [partial(self._accept, entry, *self.check(entry)) for entry in requests]
        coming = sum(request.sampling.n for request in requests)
        self._mail.submit(jobs, coming, "n" if len(requests) == 1 else "prompt")

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        return self.geometry.vocab_size

    @property
    def most_completions(self) -> int | None:
        """More completions at once than these may never run and wait; None is no limit."""
        return self._mail.most_completions

    def check_queue(self, coming: int) -> None:
        """Raise `OverloadError` if `submit` would for `coming` completions.

        It waits for nothing, so a server asks before it prepares a request.
        """
        self._mail.check_queue(coming)

    def check(self, request: Request) -> tuple[Retention, int]:
        """The checks of `submit`: the retention of `request`, and the tokens it may generate."""
        return self.admission.check(request)

    def abort(self, request_id: str) -> None:
        """End every completion of a request and free its pages; unknown ids are ignored."""
        self._mail.post(lambda: self._drop(request_id))

    @property
    def waiting(self) -> int:
        """How many completions have no place in the batch now."""
        return self._mail.waiting

    def stats(self) -> EngineStats:
        """One reading of the engine's state. While a thread steps, the last that it published.

        That is no older than the last end of an answer, and no older than `STATS_EVERY_S` and a
        step.
        """
        if self._thread is None:
            self._publish_stats()
        return self._stats

    def watch(self, observer: Observer) -> Watched:
        """Tell `observer` of every step from now on. Call it before `start`."""
        if self._watching is None:
            self._watching = Watching(
                self.config.speculation,
                self._statistics,
                None if self._runner.recorder is None else self._runner.recorder.store,
            )
        self._watching.observers.append(observer)
        return self._watching

    def follow(self, tell: Callable[[], None]) -> None:
        """Call `tell` after each step and whenever events are out, and when the thread ends.

        It is called on the engine's thread. Call `follow` before `start`.
        """
        self._followers.append(tell)

    def _send_events(self) -> None:
        self._outbox.send()
        for tell in self._followers:
            tell()

    def _send_settled(self) -> None:
        """Send what the step before has left to be sent while this one runs."""
        if self._outbox:
            self._send_events()

    def start(self) -> None:
        """Run steps on a thread of its own until `stop`."""
        if self._ranks is not None:
            self._ranks.tell_faults(self._stop_for)
        self._thread = threading.Thread(target=self._serve, name="tangram-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step. Requests in flight are aborted."""
        self._mail.stop()
        if self._thread is not None:
            self._thread.join()
        if (disk := self._scheduler.cache.disk) is not None:
            if self.healthy:
                self._attempt(self._save)
            disk.close()
        if self._ranks is not None:
            self._ranks.close()

    def _stop_for(self, fault: str) -> None:
        """End the thread because a rank has failed."""

        def fail() -> None:
            raise EngineError(fault)

        self._mail.post(fail)

    # -- the loop ----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while anything is queued or running."""
        return bool(self._mail or self._answers)

    def step(self) -> bool:
        """One step: schedule, plan, run, commit, emit. Returns False if there was nothing to do.

        If it fails, all requests end and nothing stays cached, because what it has written is
        unknown.
        """
        begin_s = time.monotonic()
        try:
            worked = self._runner.meters.time(self._step)
        except BaseException:
            self._abandon("a step of the engine failed")
            raise
        step = self._scheduled
        if self._watching is not None:
            self._watching.tell(step, begin_s)
        # Tokens that drafts have settled are sent while a GPU computes the next step.
        if step is None or not (self.ahead and step.drafts):
            self._send_events()
        return worked

    def _step(self) -> bool:
        step = self._schedule()
        if step is None:
            return self._rest()
        planned, completions = self._plan(step)
        flight = self._run(planned, completions)
        self._commit(step)
        self._emit(flight)
        self._runner.collect()
        self._save_last()
        return True

    def _schedule(self) -> Step | None:
        """The next step, after the jobs of other threads; None if nothing is to be computed."""
        changed = self._do_jobs() or self._checked
        self._plan_drafts()
        step = self._scheduled = self._scheduler.schedule()
        self._publish_queue()
        if step is None:
            return None
        if changed or time.monotonic() - self._stats_s > STATS_EVERY_S:
            self._publish_stats()
        self._checked = False
        if self._watching is not None:
            self._watching.tell_admissions()
        return step

    def _save_last(self) -> None:
        """Send to disk what the last step has published, if no other step may come."""
        if self._scheduler.cache.disk is not None and not self._scheduler.running:
            self._save()

    def _save(self) -> None:
        moves, awaited, _ = self._scheduler.cache.take_moves(())
        self._runner.move(Step((), 0, moves, awaited))

    def _rest(self) -> bool:
        """End what is in flight. Returns False if nothing is, and nothing is awaited."""
        self._save_last()  # of those that were aborted
        if self._land() or self._scheduler.fetching:
            return True
        self._runner.collect(awaited=True)  # no later step would
        self._check_once()
        return False

    def _plan(self, step: Step) -> tuple[PlannedStep, Sequence[Completion]]:
        """The forward passes of `step`, and who gets tokens of it.

        The host knows all of it, so it waits for no device. A GPU computes the step before
        meanwhile, or drafts: it is told to before the passes are built.
        """
        sampling = [row for row in step.rows if row.sample]
        completions = self._answers.of(sampling, self._scheduler.running)
        if not step.drafts:
            return self._runner.plan(step), completions
        if self._verifier is None:
            raise IntegrityError("a step has drafts, but this engine does not speculate")
        return self._verifier.plan(step, completions), completions

    def _run(self, planned: PlannedStep, completions: Sequence[Completion]) -> Flight:
        """Launch a step. While it runs, the step before is read and events are sent.

        Drafts are verified at once.
        """
        awaited = self._flight is not None or not self.ahead
        if self._verifier is not None and planned.drafted is not None:
            verified = self._verifier.run(planned, completions, self._send_settled)
            return Flight(planned.step, completions, awaited, lambda: verified)
        # The tokens that a grammar allows depend on the token before, which is read while the
        # device computes this step.
        constrained = any(completion.constrained for completion in completions)
        samplers = [completion.sampler for completion in completions]
        scored = self._list_scored(planned.step)
        asked = [completion.request.sampling.prompt_logprobs or 0 for completion in scored]
        before = self._land if constrained else lambda: None
        choice = self._runner.run(planned, samplers, before, asked)
        self._send_settled()
        self._land()
        if choice is None:
            return Flight(planned.step, completions, awaited, list)
        read_scores = tuple if choice.prompts is None else choice.prompts.by_part
        return Flight(planned.step, completions, awaited, choice.by_row, scored, read_scores)

    def _list_scored(self, step: Step) -> Sequence[Completion]:
        """Whose prompts `step` scores."""
        rows = step.scored_rows
        return self._answers.of(rows, self._scheduler.running) if rows else ()

    def _emit(self, flight: Flight) -> None:
        """Expect the tokens of a step, and enter them unless the device still computes them."""
        for completion in flight.completions:
            completion.sequence.expect()
        self._flight = flight if flight.completions or flight.scored else None
        if flight.step.drafts or not self.ahead:
            self._land()
        if self._speculation is not None and flight.times_decoding:
            self._speculation.end_step()

    def _plan_drafts(self) -> None:
        """Choose the drafts of the next step. It can have some if all tokens are known.

        A step that prefills has none: its time and its tokens are for the prompts.
        """
        speculation = self._speculation
        if speculation is None:
            return
        speculation.begin_step()
        if speculation.rests(len(self._scheduler.running)):
            return
        self._scheduler.leave_open()  # drafts are for those who go on, too
        decoding = self._scheduler.decoding
        waiting = bool(self._scheduler.waiting)
        if self._scheduler.prefilling or not speculation.plan(decoding, waiting=waiting):
            speculation.skip(decoding)
        else:
            self._land()
            speculation.prepare(self._scheduler.decoding)

    def _land(self) -> bool:
        """Enter the tokens of the step in flight. Returns False if there are none."""
        flight, self._flight = self._flight, None
        if flight is None:
            return False
        with self._runner.meters.waiting():
            tokens, scores = flight.read(), flight.read_scores()
        for completion, part in zip(flight.scored, scores, strict=True):
            if part is not None:
                completion.scores.append(part)
            elif not completion.ended:
                self._fail(completion)
        for completion, found in zip(flight.completions, tokens, strict=True):
            self._take(completion, found)
        self._publish_queue()
        return True

    def _commit(self, step: Step) -> None:
        self._scheduler.commit(step)
        if self._runner.recorder is not None:
            self._runner.recorder.commit(self._scheduler.computing)

    def _do_jobs(self) -> bool:
        """Do the jobs of other threads. Returns False if there are none."""
        found = bool(self._mail)
        while (job := self._mail.take()) is not None:
            job()
        return found

    def _publish_queue(self) -> None:
        self._mail.publish(self._scheduler.excess(self._answers.held_back))

    def _publish_stats(self) -> None:
        self._stats, self._stats_s = self._statistics.read(), time.monotonic()

    def _fail(self, completion: Completion) -> None:
        """End a request whose logits show unsound state, and forget that state."""
        request_id = completion.request.request_id
        _log.error(
            "request %s is ended: its logits %s",
            request_id,
            BROKEN_LOGITS,
            extra={"request_id": request_id},
        )
        self._runner.clear(self._scheduler.quarantine(completion.sequence))
        self._drop(request_id, f"the logits of this request {BROKEN_LOGITS}")

    def _abandon(self, error: str) -> None:
        """End all requests, and forget what is cached."""
        self._flight = None
        self._drop_all(error)
        self._attempt(self._clear_prefixes)
        self._attempt(self._send_events)

    def _drop_all(self, error: str) -> None:
        for request_id in self._answers.request_ids:
            self._attempt(partial(self._drop, request_id, error))
            for left in self._answers.of_request(request_id):  # its end has failed
                self._answers.remove(left)
                self._outbox.put(left.request, refuse(left.request, left.index, error))

    @staticmethod
    def _attempt(work: Job) -> None:
        try:
            work()
        except Exception:
            _log.exception("the engine ends, and a part of its end has failed")

    def clear_cache(self) -> None:
        """Forget every unused cached prefix, on disk too."""
        self._between_steps(self._clear_everywhere)

    @property
    def _caches(self) -> Iterator[CacheManager]:
        """That of the model, and that of a model which drafts."""
        yield self._scheduler.cache
        if self._speculation is not None and self._speculation.cache is not None:
            yield self._speculation.cache

    def _clear_prefixes(self) -> None:
        self._scheduler.open_chunks.forget()
        for cache in self._caches:
            cache.prefix.clear()
            cache.host.drop_saves()

    def _clear_everywhere(self) -> None:
        self._clear_prefixes()
        if (disk := self._scheduler.cache.disk) is not None:
            disk.clear()

    def _check_pages(self) -> None:
        for cache in self._caches:
            check_accounting(cache)

    def _between_steps(self, work: Callable[[], None]) -> None:
        """Do `work`, between two steps if a thread steps; raises what `work` raises."""
        if self._thread in (None, threading.current_thread()):
            work()
            return
        done = Future[None]()

        def job() -> None:
            try:
                work()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        if not self._mail.post(job):  # the thread has ended
            job()
        done.result()

    def _serve(self) -> None:
        try:
            while True:
                worked = self.step()
                if self._mail.stopping or not (worked or self._mail.wait()):
                    break
        except BaseException:  # whatever it was, the engine has stopped
            self.healthy = False
            _log.exception("the engine has stopped")
        self._mail.close()
        while (job := self._mail.take()) is not None:  # requests that have just come end, too
            self._attempt(job)
        self._drop_all("the engine has stopped")
        self._attempt(self._publish_queue)
        self._attempt(self._publish_stats)
        if (watching := self._watching) is not None:
            self._attempt(lambda: watching.tell(None, time.monotonic()))
        for last in (self._outbox.send, *self._followers):
            self._attempt(last)

    # -- requests ----------------------------------------------------------------------------------

    def _accept(self, request: Request, retention: Retention, max_tokens: int) -> None:
        self._mail.arrive(request.sampling.n)
        try:
            self._scheduler.add(self._answers.begin(request, retention, max_tokens).sequence)
        except Exception:
            request_id, error = (
                request.request_id,
                "the engine could not take in this request: the log has the reason",
            )
            _log.exception(
                "request %s could not be taken in", request_id, extra={"request_id": request_id}
            )
            if self._answers.of_request(request_id):
                self._drop(request_id, error)
            else:
                for index in range(request.sampling.n):
                    self._outbox.put(request, refuse(request, index, error))

    def _start_siblings(self, completion: Completion) -> None:
        """Start the other completions of a request once the first has its first token.

        The first computes the prompt of all.
        """
        self._mail.start()
        for sibling in self._answers.siblings(completion.request.request_id):
            self._scheduler.add(sibling.sequence)

    def _drop(self, request_id: str, error: str | None = None, field: str | None = None) -> None:
        self._answers.siblings(request_id)
        for completion in self._answers.of_request(request_id):
            usage = self._statistics.usage(completion.sequence)
            self._end(completion)
            self._answers.remove(completion)
            event = completion.event(usage, (), FinishReason.ABORT, error, field)
            self._outbox.put(completion.request, event)

    # -- emit --------------------------------------------------------------------------------------

    def _take(self, completion: Completion, tokens: Sequence[ChosenToken | None]) -> None:
        """Enter the tokens that a completion gets of a step, until one ends it."""
        for part in completion.divide(tokens):
            if completion.ended:  # perhaps with another of its request, whose logits are unsound
                return
            sound = [token for token in part if token is not None]
            if len(sound) < len(part):
                self._fail(completion)
                return
            if completion.request.sampling.max_tokens == 0:
                sound = []
            reason = completion.take(sound)
            if completion.error is not None:
                self._drop(completion.request.request_id, *completion.error)
                return
            self._scheduler.counters.generated_tokens += len(sound)
            usage = self._statistics.usage(completion.sequence)
            if usage.completion_tokens == len(sound):
                self._start_siblings(completion)
            if reason is not None:
                self._end(completion)
                self._answers.remove(completion)
            self._outbox.put(completion.request, completion.event(usage, sound, reason))

    def _end(self, completion: Completion) -> None:
        completion.ended = True
        if self._watching is not None:
            self._watching.end(completion.sequence)
        if self._speculation is not None:
            self._speculation.remember(completion.sequence)
        self._scheduler.remove(completion.sequence)

    def _check_once(self) -> None:
        """Check the page accounting when idle, so that a mistake shows before the next load."""
        if not self._checked:
            self._check_pages()
            self._checked = True
            self._publish_stats()
