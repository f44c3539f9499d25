"""Simulates the stream of a run by events: generation, rewards, batches, training, weight updates and faults.

Engines decode their requests together, so a request is slower while its engine has more of them. A batch trains as soon
as its samples have rewards. New weights pause the engines. A fault takes an engine away, whose requests start again on
others, or the trainer. The simulation is for layouts whose trainer has separate GPUs.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WAITING, DECODING, UPDATING, LOST, TRAINING = "waiting", "decoding", "updating", "lost", "training"


@dataclass(frozen=True)
class StreamParts:
    """The parts of a run. Times are seconds."""

    engines: int
    sequences: int
    """Largest number of requests that an engine runs at the same time."""
    token_s: Callable[[int, float], float]
    """Returns the seconds per token from the number of an engine's requests and their mean length."""
    train_s: float
    update_s: float
    lengths: Sequence[tuple[int, int]]
    """(prompt tokens, response tokens) per sample of a step, drawn anew in each step."""
    ahead: int = 0
    """Steps that generation may be ahead of training."""
    reward_s: float = 0.0
    """Mean time of a reward, which is exponential."""
    engine_faults: float = 0.0
    """Faults per engine and second."""
    trainer_faults: float = 0.0
    engine_repair_s: float = 30.0
    trainer_repair_s: float = 60.0


@dataclass
class Simulated:
    """The result: seconds per step, and the share of the time by state, of an engine and of the trainer."""

    step_s: float
    engine: dict[str, float]
    trainer: dict[str, float]
    faults: int


@dataclass
class _Engine:
    """An engine. `done` tokens were decoded for each request that has run all the time; a request ends when `done`
    reaches its entry in `ends`."""

    done: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    length: float = 0.0
    """Sum of the present lengths of its requests, as far as they are known without the tokens decoded since `since`."""
    since: float = 0.0
    token_s: float = 0.0
    """Seconds per token until the next response ends, from the mean length until then."""
    version: int = 0
    up: bool = True
    times: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Simulation:
    """One simulation with a seed. `run` returns its result."""

    def __init__(self, stream: StreamParts, seed: int = 0) -> None:
        self.stream, self.random = stream, random.Random(seed)
        self.now, self.order = 0.0, itertools.count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.engines = [_Engine() for _ in range(stream.engines)]
        self.queue: deque[tuple[int, int]] = deque()
        self.sizes: dict[int, tuple[int, int]] = {}
        self.numbers = itertools.count()
        self.batch = len(stream.lengths)
        self.ready, self.started, self.trained = 0, 0, 0
        self.state, self.state_since = WAITING, 0.0
        self.paused = False
        self.trainer_times: defaultdict[str, float] = defaultdict(float)
        self.training_ends, self.faults = 0.0, 0

    def run(self, steps: int, warm: int = 2) -> Simulated:
        """Simulates `warm` + `steps` steps and returns the means of the last `steps`."""
        self._plan_faults()
        self._request()
        begun = 0.0
        while self.trained < warm + steps:
            self.now, _, action = heapq.heappop(self.events)
            before = self.trained
            action()
            if before < warm <= self.trained:
                begun = self.now
                self._clear()
        self._settle()
        lasted = self.now - begun
        whole = lasted * len(self.engines)
        states = {name for engine in self.engines for name in engine.times}
        of_engines = {
            name: sum(engine.times[name] for engine in self.engines) / whole for name in sorted(states)
        }
        return Simulated(
            lasted / steps,
            of_engines,
            {name: x / lasted for name, x in self.trainer_times.items()},
            self.faults,
        )

    def _at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), action))

    def _clear(self) -> None:
        self._settle()
        for engine in self.engines:
            engine.times.clear()
        self.trainer_times.clear()
        self.faults = 0

    def _settle(self) -> None:
        for engine in self.engines:
            self._advance(engine)
        self._enter(self.state)

    def _request(self) -> None:
        """Starts the requests of all steps that generation may begin."""
        while self.started <= self.trained + self.stream.ahead:
            lengths = list(self.stream.lengths)
            self.random.shuffle(lengths)
            for size in lengths:
                number = next(self.numbers)
                self.sizes[number] = size
                self.queue.append((number, size[1]))
            self.started += 1
        self._fill()

    def _fill(self) -> None:
        """Gives waiting requests to the engines with the fewest requests."""
        if not self.queue or self.paused:
            return
        free = [
            (len(e.ends), i)
            for i, e in enumerate(self.engines)
            if e.up and len(e.ends) < self.stream.sequences
        ]
        heapq.heapify(free)
        changed = set()
        while self.queue and free:
            count, i = heapq.heappop(free)
            engine = self.engines[i]
            if i not in changed:
                self._advance(engine)
                changed.add(i)
            number, response = self.queue.popleft()
            heapq.heappush(engine.ends, (engine.done + response, number))
            engine.length += self.sizes[number][0]
            if count + 1 < self.stream.sequences:
                heapq.heappush(free, (count + 1, i))
        for i in changed:
            self._plan_end(self.engines[i])

    def _advance(self, engine: _Engine) -> None:
        """Advances an engine to the present time: adds its decoded tokens and its time in the present state."""
        lasted, engine.since = self.now - engine.since, self.now
        if not engine.up:
            engine.times[LOST] += lasted
        elif self.paused:
            engine.times[UPDATING] += lasted
        elif engine.ends:
            tokens = lasted / engine.token_s
            engine.done += tokens
            engine.length += tokens * len(engine.ends)
            engine.times[DECODING] += lasted
        else:
            engine.times[WAITING] += lasted

    def _plan_end(self, engine: _Engine) -> None:
        engine.version += 1
        if not engine.ends or self.paused or not engine.up:
            return
        version, left = engine.version, max(0.0, engine.ends[0][0] - engine.done)
        engine.token_s = self.stream.token_s(len(engine.ends), engine.length / len(engine.ends) + left / 2)
        self._at(left * engine.token_s, lambda: self._end(engine, version))

    def _end(self, engine: _Engine, version: int) -> None:
        if version != engine.version:
            return
        self._advance(engine)
        engine.done = max(engine.done, engine.ends[0][0])
        while engine.ends and engine.ends[0][0] <= engine.done + 1e-6:
            _, number = heapq.heappop(engine.ends)
            engine.length = max(0.0, engine.length - sum(self.sizes.pop(number)))
            delay = self.random.expovariate(1 / self.stream.reward_s) if self.stream.reward_s else 0.0
            self._at(delay, self._rewarded)
        self._plan_end(engine)
        self._fill()

    def _rewarded(self) -> None:
        self.ready += 1
        self._train()

    def _enter(self, state: str) -> None:
        self.trainer_times[self.state] += self.now - self.state_since
        self.state, self.state_since = state, self.now

    def _train(self) -> None:
        if self.state == WAITING and self.ready >= self.batch:
            self.ready -= self.batch
            self._enter(TRAINING)
            self.training_ends = self.now + self.stream.train_s
            self._at(self.stream.train_s, self._update)

    def _update(self) -> None:
        if self.state != TRAINING or self.now + 1e-9 < self.training_ends:
            return  # a fault has moved the end
        self._enter(UPDATING)
        for engine in self.engines:
            self._advance(engine)
        self.paused = True
        self._at(self.stream.update_s, self._resume)

    def _resume(self) -> None:
        for engine in self.engines:
            self._advance(engine)
        self.paused = False
        self.trained += 1
        self._enter(WAITING)
        for engine in self.engines:
            self._plan_end(engine)
        self._request()
        self._train()

    def _plan_faults(self) -> None:
        if self.stream.engine_faults:
            for engine in self.engines:
                self._plan_engine_fault(engine)
        if self.stream.trainer_faults:
            self._at(self.random.expovariate(self.stream.trainer_faults), self._lose_trainer)

    def _plan_engine_fault(self, engine: _Engine) -> None:
        self._at(self.random.expovariate(self.stream.engine_faults), lambda: self._lose_engine(engine))

    def _lose_engine(self, engine: _Engine) -> None:
        self._advance(engine)
        self.faults += 1
        engine.up = False
        for _, number in engine.ends:
            self.queue.appendleft((number, self.sizes[number][1]))
        engine.ends, engine.length = [], 0.0
        self._plan_end(engine)
        self._at(self.stream.engine_repair_s, lambda: self._repair_engine(engine))
        self._fill()

    def _repair_engine(self, engine: _Engine) -> None:
        self._advance(engine)
        engine.up = True
        self._plan_engine_fault(engine)
        self._fill()

    def _lose_trainer(self) -> None:
        """Loses the trainer for a while. A trainer that is lost while it trains computes the step again."""
        self.faults += 1
        delay = self.stream.trainer_repair_s
        if self.state == TRAINING:
            self._enter(LOST)
            self._at(delay, self._train_again)
        elif self.state == WAITING:
            self._enter(LOST)
            self._at(delay, self._trainer_back)
        self._at(delay + self.random.expovariate(self.stream.trainer_faults), self._lose_trainer)

    def _train_again(self) -> None:
        self._enter(TRAINING)
        self.training_ends = self.now + self.stream.train_s
        self._at(self.stream.train_s, self._update)

    def _trainer_back(self) -> None:
        self._enter(WAITING)
        self._train()
