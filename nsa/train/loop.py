"""The loop: data, steps, lines of the log, evaluation, checkpoints.

Nothing in it waits for the device but the line of the log, every ``log.every`` steps.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from nsa import settings
from nsa.config import ModelConfig
from nsa.dense import DenseAttention
from nsa.model import TinyLM
from nsa.routing import Problem, Route, route_dense
from nsa.train import flight, flops, observe, parallel
from nsa.train.assemble import assemble
from nsa.train.checkpoint import CheckpointStore
from nsa.train.config import RunConfig
from nsa.train.data import load, tokenizer_of
from nsa.train.errors import TrainError, TrainExit
from nsa.train.heartbeat import HeartbeatWriter
from nsa.train.initial_weights import initial_weights
from nsa.train.largest_batch import fits_on, largest
from nsa.train.log import RunLog
from nsa.train.observe import Probe
from nsa.train.published import go_no_go
from nsa.train.records import Batch, Phase, StepRecord
from nsa.train.rng import rng_state, set_rng_state
from nsa.train.run_folder import source_of
from nsa.train.schedule import learning_rate
from nsa.train.watchdog import heartbeat_path, read_halt

if TYPE_CHECKING:
    from nsa.train.data.corpora import Split
    from nsa.train.data.loader import Loader
    from nsa.train.data.vocabulary import Tokenizer

GO_NO_GO_STEPS = 50
AGREE_S = 2.0  # between questions to all ranks whether to end; far below watchdog.grace_s
Notify = Callable[[str], None]


@dataclass(slots=True)
class _Interval:
    """Since the last line of the log."""

    begin_s: float
    first_step: int
    waits_s: list[float] = field(default_factory=list)
    fetches_s: list[float] = field(default_factory=list)
    num_bytes: int = 0
    num_labels: int = 0
    flops: float = 0.0


class Trainer:
    """Trains as ``config`` wants it, into the folder ``out``, from the checkpoint ``resume`` where
    one is given.

    `run` returns the exit code of a run that ended by itself or obeyed a halt or a signal; what
    else ends one is a TrainError. ``notify`` is given lines for the user, on rank 0.
    """

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        *,
        resume: Path | None = None,
        notify: Notify = lambda line: None,
    ) -> None:
        self.config, self.out, self._resume = config, out, resume
        self.notify: Notify = notify
        self.step_count = 0
        self._stopped_by: int | None = None
        self._bad_before = 0  # bad steps of the run that is resumed

    def run(self) -> TrainExit:
        with ExitStack() as closing:
            place = settings.launched_place()
            rank, size = (0, 1) if place is None else (place.rank, place.size)
            self._heart = HeartbeatWriter(
                heartbeat_path(self.out, rank),
                rank=rank,
                pid=os.getpid(),
                world_size=size,
                steps=self.config.train.steps,
            )
            closing.callback(self._heart.close)
            closing.enter_context(self._obeying_signals())
            self._heart.beat(Phase.START, 0)
            self._heart.beat(Phase.CONNECT, 0)
            self.world = parallel.connect(self.config)
            closing.callback(parallel.disconnect, self.world)
            parallel.wait_for_all(self.world)  # a halt.json that is there now is of this run
            closing.enter_context(flight.recorded(self.out, self.world))
            self._heart.beat(Phase.LOAD, 0)
            self._load(closing)
            return self._train()

    # what a run is made of

    def _load(self, closing: ExitStack) -> None:
        config, world = self.config, self.world
        self._log = RunLog(
            self.out,
            world.rank,
            tensorboard=config.log.tensorboard,
            config_sha256=config.sha256(),
        )
        closing.callback(self._log.close)
        if world.is_first:  # which makes the BPE that the others read
            tokenizer_of(config, self.out)
        parallel.wait_for_all(world)
        self.tokenizer: Tokenizer = tokenizer_of(config, self.out)
        size = self.tokenizer.vocab_size
        if world.is_first and config.model.vocab_size not in (size, ModelConfig().vocab_size):
            self.notify(
                f"model.vocab_size is {size:,}, the tokenizer's, not {config.model.vocab_size:,}"
            )
        config = self.config = config.with_vocab(size)
        self.loader: Loader = self._loader("train")
        closing.callback(self.loader.close)
        self._held_out: Loader | None = None
        if config.train.eval_every:
            self._held_out = self._loader("held_out")
            closing.callback(self._held_out.close)
        sharded = world.kind in ("fsdp", "hsdp")
        if config.train.sample_every and (sharded or config.train.attention == "dense"):
            raise TrainError(
                TrainExit.USAGE,
                f"train.sample_every={config.train.sample_every} with"
                f" {world.kind if sharded else 'train.attention=dense'}; wanted NSA with whole"
                " weights, which alone decodes from a cache; --set train.sample_every=0",
            )
        trained = assemble(config, world, weights=self._initial_weights())
        self.plain_model, self.model = trained.plain_model, trained.model
        self.optimizer, self.step = trained.optimizer, trained.step
        self.store = CheckpointStore(
            self.out,
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
            config_sha256=config.sha256(),
            rank=world.rank,
            world_size=world.size,
            config=config.identity(),
            timeout_s=config.parallel.timeout_s,
        )
        closing.callback(self.store.close)
        self.store.prepare()
        if self._resume is not None:
            self._restore()
            self._log.go_on_after(self.step_count)
        data = self.loader.describe()
        route = self.route()
        loose = [f"{b.branch}.{b.kernel}" for b in route.branches if not b.repeatable]
        self._log.event(
            "start",
            step=self.step_count,
            world_size=world.size,
            parallel=world.kind,
            device=self._device_name(),
            torch=torch.__version__,
            route=route.explain(),
            not_repeatable=loose,
            cuda_graph="on" if not self.step.no_graph else f"off: {self.step.no_graph}",
            tokenizer_sha256=self.tokenizer.sha256,
            data=data,
            entropy_floor_nats=self.loader.entropy_floor_nats,
        )
        if world.is_first:
            if left_out := data["binary_files_left_out"]:
                self.notify(
                    f"data.paths: binary files left out: {left_out:,} (a NUL in the first 8,000"
                    " bytes)"
                )
            how = self.step.no_graph
            self.notify(
                f"each step is a CUDA graph's replay, from step {self.step_count + 4} on"
                if not how
                else f"no CUDA graph: {how}"
            )
            if loose:
                self.notify(
                    f"{', '.join(loose)}: the backward gives other last bits each time, so a run"
                    " that resumes is not the same to the bit"
                )

    def _initial_weights(self) -> Mapping[str, Tensor] | None:
        named = self.config.train.init_from
        if named is None or self._resume is not None:  # a checkpoint of this run has its own
            return None
        source = source_of(named)
        weights = initial_weights(source, self.config, self.tokenizer)
        self._log.event("init_from", source=str(source))
        if self.world.is_first:
            self.notify(f"the weights are those of {source}; the optimizer begins anew")
        return weights

    def _loader(self, split: Split) -> Loader:
        return load(
            self.config,
            rank=self.world.rank,
            world_size=self.world.size,
            split=split,
            tokenizer=self.tokenizer,
        )

    def route(self) -> Route:
        """What serves each branch of the first layer, and why nothing else."""
        from nsa import capability

        train, first = self.config.train, cast("Any", self.plain_model.blocks[0]).attention
        dtype = "float32" if train.precision == "fp32" else "bfloat16"
        problem = Problem.of(
            self.config.model, batch=train.batch, tokens=train.seq_len, dtype=dtype
        )
        where = capability.probe(str(self.world.device))
        if isinstance(first, DenseAttention):
            return route_dense(first.kind, problem, where)
        return settings.decide(problem, where, path=train.path, fa2=train.fa2)

    def _device_name(self) -> str:
        device = self.world.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

    # checkpoints

    def _state(self) -> dict[str, Any]:
        return {"model": self.plain_model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _restore(self) -> None:
        state = self._state()
        extras = self.store.load(state, self._resume)
        self.plain_model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        own = extras[min(self.world.rank, len(extras) - 1)]
        if own["tokenizer_sha256"] != self.tokenizer.sha256:
            raise TrainError(
                TrainExit.DATA,
                f"the checkpoint's tokenizer is {own['tokenizer_sha256'][:12]}, this run's is"
                f" {self.tokenizer.sha256[:12]}; wanted the same; use the run folder's"
                " tokenizer.json",
            )
        self.step_count = int(own["step"])
        self._bad_before = int(own["bad_steps"])
        self.step.restore_bad_steps(self._bad_before)
        self.loader.load_state_dict(self.loader.merge([one["loader"] for one in extras]))
        set_rng_state(own["rng"])
        if self.world.is_first:
            self.notify(f"resumed at step {self.step_count}")

    def _save(self) -> None:
        self._heart.beat(Phase.SAVE, self.step_count)
        begin = time.monotonic()
        extra = {
            "step": self.step_count,
            "bad_steps": self.step.bad_steps(),
            "tokenizer_sha256": self.tokenizer.sha256,
            "loader": self.loader.state_dict(),
            "rng": rng_state(),
        }
        self.store.save(self.step_count, self._state(), extra)
        # for which the loop waited; the store's thread may still write
        seconds = time.monotonic() - begin
        self._log.event("save", step=self.step_count, seconds=seconds)

    # the loop

    def _train(self) -> TrainExit:
        config, train = self.config, self.config.train
        self._probe: Probe | None = None
        self._is_probe_new = False
        self._agree_every = 1
        began_at, judging = self.step_count, self.world.is_first
        interval = _Interval(time.monotonic(), self.step_count)
        saved_at = self.step_count if self._resume is not None else -1
        while self.step_count < train.steps:
            if (end := self._agreed_end()) is not None:
                return self._end_early(end, saved_at)
            batches = self._next_batches(interval)
            phase = Phase.STEP if self.step.is_built else Phase.BUILD
            self._heart.beat(phase, self.step_count)
            was_built = self.step.is_built
            self._run_step(batches)
            self.step_count += 1
            is_first = self.step.is_built and not was_built
            if config.log.probe_every and (is_first or self._is_due(config.log.probe_every)):
                self._probe, self._is_probe_new = self._look(batches[0]), True
            if not was_built:  # its time is the compiler's, that of the first probe, too
                interval = _Interval(time.monotonic(), self.step_count)
            if self._is_due(config.log.every):
                interval = self._write_line(interval)
                if judging and self.step_count - began_at >= GO_NO_GO_STEPS:
                    judging = not self._say_go_no_go()
            if train.eval_every and self._is_due(train.eval_every):
                interval = self._evaluate(interval)
            if train.sample_every and self._is_due(train.sample_every):
                self._sample()
            if config.checkpoint.every and self._is_due(config.checkpoint.every):
                self._save()
                saved_at = self.step_count
        if not self._is_due(config.log.every):
            self._write_line(interval)
        if saved_at != self.step_count:
            self._save()
        self._heart.beat(Phase.SAVE, self.step_count)
        self.store.wait()
        self._log.event("done", step=self.step_count)
        self._heart.beat(Phase.DONE, self.step_count)
        return TrainExit.OK

    def _is_due(self, every: int) -> bool:
        return self.step_count % every == 0

    def _next_batches(self, interval: _Interval) -> list[Batch]:
        self._heart.beat(Phase.DATA, self.step_count)
        begin = time.monotonic()
        batches = list(itertools.islice(self.loader, self.config.train.accumulate))
        interval.waits_s.append(time.monotonic() - begin)
        interval.fetches_s += [one.fetch_s for one in batches]
        interval.num_bytes += sum(one.num_bytes for one in batches)
        interval.num_labels += sum(one.num_labels for one in batches)
        interval.flops += sum(self._flops_of(one) for one in batches)
        return batches

    def _run_step(self, batches: list[Batch]) -> None:
        lr = learning_rate(self.step_count, self.config.train)
        try:
            self.step(batches, lr)
        except torch.OutOfMemoryError:
            if self.step.is_built or self.world.size > 1:
                raise
        else:
            return
        self._refuse_batch()

    def _refuse_batch(self) -> None:
        """Raise the error of a first step that does not fit, with the largest batch that does."""
        train, device = self.config.train, self.world.device
        self.optimizer.zero_grad()
        found = largest(fits_on(self.plain_model, self.config, device), train.batch)
        if found:
            accumulate = -(-train.batch * train.accumulate // found)
            hint = f"--set train.batch={found} --set train.accumulate={accumulate}"
        else:
            hint = "shorten train.seq_len, or --set model.checkpoint_layers=[0,N]"
        raise TrainError(
            TrainExit.MEMORY,
            f"out of memory in step {self.step_count + 1} with train.batch={train.batch} of"
            f" {train.seq_len} tokens; the largest batch that fits is {found}; {hint}",
        )

    # lines

    def _write_line(self, interval: _Interval) -> _Interval:
        config, world = self.config, self.world
        totals = self.step.read()
        seconds, steps = time.monotonic() - interval.begin_s, self.step_count - interval.first_step
        tokens_per_s = step_ms = mfu = None
        if steps:
            tokens_per_s = config.tokens_per_step * steps * world.size / seconds
            step_ms = 1e3 * seconds / steps
            mfu = flops.mfu_pct(interval.flops, seconds, flops.peak_of(self._device_name()))
        bits = None
        counts = torch.tensor([interval.num_labels, interval.num_bytes], device=world.device)
        num_labels, num_bytes = parallel.total(counts, world).tolist()
        if totals.loss_nats is not None and num_bytes:
            bits = totals.loss_nats / math.log(2) * num_labels / num_bytes
        memory = self._memory()
        record = StepRecord(
            time_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
            rank=world.rank,
            step=self.step_count,
            loss_nats=totals.loss_nats,
            bits_per_byte=bits,
            gradient_norm=totals.gradient_norm,
            learning_rate=learning_rate(self.step_count - 1, config.train),
            tokens_per_s=tokens_per_s,
            mfu_pct=mfu,
            step_ms=step_ms,
            wait_p50_ms=_percentile_ms(interval.waits_s, 0.5),
            wait_p95_ms=_percentile_ms(interval.waits_s, 0.95),
            fetch_p50_ms=_percentile_ms(interval.fetches_s, 0.5),
            fetch_p95_ms=_percentile_ms(interval.fetches_s, 0.95),
            bad_steps=totals.bad_steps,
            memory_allocated_bytes=memory[0],
            memory_reserved_bytes=memory[1],
            memory_rss_bytes=_rss_bytes(),
            engaged=self._engaged(),
            statistics=self._new_statistics(),
            config_sha256=config.sha256(),
        )
        self._last = record
        self._log.write(record)
        self._heart.report(
            replace(record, bad_steps=record.bad_steps - self._bad_before),
            entropy_floor_nats=self.loader.entropy_floor_nats,
            slow=observe.slow_path(record.engaged or {}, config.train.path),
        )
        if step_ms is not None:
            slowest_ms = parallel.largest(max(1, round(step_ms)), world)
            self._agree_every = max(1, int(1e3 * AGREE_S) // slowest_ms)
        return _Interval(time.monotonic(), self.step_count)

    def _new_statistics(self) -> dict[str, Any] | None:
        """Of a probe since the last line."""
        new, self._is_probe_new = self._is_probe_new, False
        return dict(self._probe.statistics) if new and self._probe is not None else None

    def _engaged(self) -> dict[str, int] | None:
        """Of a step as it was built; where that was compiled, of the last probe."""
        if self.step.engaged:
            return self.step.engaged
        return None if self._probe is None else dict(self._probe.engaged)

    def _flops_of(self, batch: Batch) -> float:
        model, attention = self.config.model, self.config.train.attention
        if batch.cu_seqlens is None:
            rows, tokens = batch.ids.shape
            return flops.step_flops(model, batch=rows, tokens=tokens, attention=attention)
        lengths = batch.cu_seqlens.diff().tolist()
        return flops.documents_flops(model, lengths, attention=attention)

    def _memory(self) -> tuple[int | None, int | None]:
        device = self.world.device
        if device.type != "cuda":
            return None, None
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)

    def _look(self, batch: Batch) -> Probe:
        return observe.probe(self.plain_model, batch, self.config, self.world)

    def _say_go_no_go(self) -> bool:
        """Of the last line; whether it had a speed to judge."""
        if self._last.tokens_per_s is None:
            return False
        total = None
        if self.world.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.world.device).total_memory
        line = go_no_go(
            self._last, self.config, memory_total_bytes=total, device_name=self._device_name()
        )
        self._log.event("go_no_go", step=self.step_count, line=line)
        self.notify(line)
        return True

    def _evaluate(self, interval: _Interval) -> _Interval:
        self._heart.beat(Phase.EVAL, self.step_count)
        if self.world.device.type == "cuda":  # queued steps are no evaluation
            torch.cuda.synchronize(self.world.device)
        begin = time.monotonic()
        assert self._held_out is not None
        batches = self._held_out.batches(self.config.train.eval_batches)
        found = observe.held_out(self.plain_model, batches, self.config, self.world)
        self._log.event(
            "eval",
            step=self.step_count,
            loss_nats=found.loss_nats,
            bits_per_byte=found.bits_per_byte,
            accuracy_pct=found.accuracy_pct,
            seconds=time.monotonic() - begin,
        )
        if self.world.is_first:
            bits = found.bits_per_byte
            shown = "" if bits is None else f", {bits:.4f} bits a byte"
            if floor := self.loader.entropy_floor_nats:
                shown += f"; the data's entropy is {floor:.4f} nats"
            self.notify(
                f"step {self.step_count}: held out {found.loss_nats:.4f} nats a token{shown}"
            )
        interval.begin_s += time.monotonic() - begin
        return interval

    def _sample(self) -> None:
        if not self.world.is_first or not isinstance(self.plain_model, TinyLM):
            return
        self._heart.beat(Phase.SAMPLE, self.step_count)
        train = self.config.train
        text = observe.write_text(
            self.plain_model,
            self.tokenizer,
            train.sample_prompt,
            tokens=train.sample_tokens,
            seed=train.seed,
        )
        self._log.event("sample", step=self.step_count, text=text)
        self.notify(f"step {self.step_count} writes: {_printable(text)}")

    # ends

    @contextmanager
    def _obeying_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run at the next step, with a checkpoint."""

        def stop(number: int, frame: object) -> None:
            if self._stopped_by is not None:
                raise KeyboardInterrupt
            self._stopped_by = number

        before = {name: signal.signal(name, stop) for name in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    def _agreed_end(self) -> TrainExit | None:
        """Why all ranks end here. Several agree, for one that left alone would leave others in a
        collective; in every step at first, then every AGREE_S, since it waits for the device.
        """
        own = 0
        if self._stopped_by is not None:
            own = int(TrainExit.INTERRUPTED)
        elif read_halt(self.out) is not None:
            own = int(TrainExit.UNHEALTHY)
        if self.world.size > 1:
            if self.step_count % self._agree_every:
                return None
            own = parallel.largest(own, self.world)
        return TrainExit(own) if own else None

    def _end_early(self, end: TrainExit, saved_at: int) -> TrainExit:
        """A halted run keeps its last good checkpoint; an interrupted one saves first."""
        if end is TrainExit.INTERRUPTED and saved_at != self.step_count:
            self._save()
        self.store.wait()
        if end is TrainExit.INTERRUPTED:
            self.notify(
                f"interrupted at step {self.step_count}, which is saved; the same command with"
                " --resume goes on"
            )
        self._log.event("end", step=self.step_count, code=int(end), reason=end.name.lower())
        self._heart.beat(Phase.DONE, self.step_count)
        return end


def _printable(text: str) -> str:
    """In one line, and without what a terminal obeys: a model of bytes writes any."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def _percentile_ms(seconds: list[float], share: float) -> float | None:
    """Nearest rank."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
