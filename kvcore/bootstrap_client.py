"""The two who talk to a bootstrap service: a prefill rank that registers, a decode instance that asks for groups."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from kvcore.addresses import Address, parse
from kvcore.bootstrap import GROUP_PATH, RANKS_PATH, REFRESH_S, Group, LookupFailure, RankInfo, error_text, read
from kvcore.errors import ConfigError, cause
from kvcore.http import HttpThread

log = logging.getLogger("kvcore.bootstrap")

FIRST_DELAY_S = 0.1
LAST_DELAY_S = 1.0
MAX_CACHED_GROUPS = 1024

OnResult = Callable[[Group | LookupFailure], None]


def _delays() -> Iterator[float]:
    delay = FIRST_DELAY_S
    while True:
        yield delay
        delay = min(2 * delay, LAST_DELAY_S)


class Registrar:
    """Keeps one rank registered at its group's bootstrap service: at the start with retries, then every ``period_s`` seconds."""

    def __init__(self, http: HttpThread, address: Address, info: RankInfo, *, limit_s: float = 30.0, period_s: float = REFRESH_S) -> None:
        self._http = http
        self._address = address
        self._info = info
        self._limit_s = limit_s
        self._period_s = period_s
        self._error: str | None = "no answer yet"
        self._keeping: concurrent.futures.Future[None] | None = None

    def start(self) -> None:
        """Block until registered, then keep it so in the background.

        Raises ``ConfigError`` naming address and reason: at once if the answer shows that this is no bootstrap service of the group,
        else after ``limit_s`` seconds.
        """
        try:
            self._http.run(self._register()).result(2 * self._limit_s + 10)
        except (concurrent.futures.CancelledError, concurrent.futures.TimeoutError) as error:
            raise self._failure("the HTTP thread was stopped or is blocked") from error
        self._keeping = self._http.run(self._keep())

    def stop(self) -> None:
        """End the background work; idempotent. The service forgets the rank when it is not registered again."""
        if self._keeping is not None:
            self._keeping.cancel()

    @property
    def last_error(self) -> str | None:
        """Why the latest registration failed; None if it succeeded."""
        return self._error

    async def _register(self) -> None:
        try:
            await asyncio.wait_for(self._register_until_done(), self._limit_s)
        except asyncio.TimeoutError as error:
            raise self._failure(f"{self._error}; gave up after {self._limit_s:g} s") from error

    async def _register_until_done(self) -> None:
        for delay in _delays():
            self._error = await self._attempt()
            if self._error is None:
                return
            await asyncio.sleep(delay)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            before = self._error
            try:
                self._error = await self._attempt()
            except ConfigError as error:
                self._error = str(error)
            if self._error and not before:
                log.error("rank %d is no longer registered at %s (%s); trying on", self._info.rank, self._address, self._error)
            if before and not self._error:
                log.info("rank %d is registered at %s again", self._info.rank, self._address)

    async def _attempt(self) -> str | None:
        """None if registered, else why not yet. Raises ``ConfigError`` if trying again is useless."""
        try:
            answer = await self._http.request("POST", self._address, RANKS_PATH, msgspec.json.encode(self._info))
        except ConnectionError as error:
            return str(error)
        text = f"answered {answer.status}: {error_text(answer.body)}"
        if answer.status >= 500 or answer.status == 409:  # 409 ends when the holder of the rank has expired
            return text
        if answer.status != 200 or not self._confirmed(answer.body):
            raise self._failure(text)
        return None

    def _confirmed(self, body: bytes) -> bool:
        try:
            return read(body, RankInfo) == self._info
        except ValueError:
            return False

    def _failure(self, reason: str) -> ConfigError:
        return ConfigError(
            f"prefill rank {self._info.rank} cannot register at bootstrap service {self._address} ({reason}); "
            "start the group's leader there, or correct the setting bootstrap"
        )


@dataclass(slots=True)
class _Question:
    """One address being asked about, and the tokens of those who wait for the answer."""

    tokens: set[int] = field(default_factory=set)
    error: str | None = None


@dataclass(slots=True)
class _Known:
    """A group, and when its address was last asked for it."""

    group: Group
    asked_at: float

    @property
    def outdated(self) -> bool:
        """Whether it should be asked for again by now."""
        return time.monotonic() - self.asked_at >= REFRESH_S


class Directory:
    """Finds prefill groups for a decode instance. All methods may be called from any thread and none blocks.

    One question per address is outstanding, whoever asks. It is asked again with back-off, as long as somebody waits, while the
    service cannot be reached or its group is not complete. Groups are cached until ``forget``; failures are not. One that is used after
    ``REFRESH_S`` is asked for again beside that, since its address may lead to another group by now while its ranks live on (P3).
    """

    def __init__(self, http: HttpThread) -> None:
        self._http = http
        self._lock = threading.Lock()
        self._tokens = itertools.count(1)
        self._waiting: dict[int, OnResult] = {}
        self._questions: dict[str, _Question] = {}
        self._groups: OrderedDict[str, _Known] = OrderedDict()

    def lookup(self, address: str, on_result: OnResult) -> int:
        """Have ``on_result`` called once with the group at ``address``, or with why there can be none: here and now if it is known, else on
        the HTTP thread.

        Returns a token for ``drop``. What ``on_result`` raises is logged and has no other effect (T7).
        """
        with self._lock:
            token = next(self._tokens)
            self._waiting[token] = on_result
            known = self._groups.get(address)
            question = self._questions.get(address)
            fresh = None
            if known is None and question is not None:
                question.tokens.add(token)
            elif known is None:
                fresh = self._questions[address] = _Question({token})
            else:
                self._groups.move_to_end(address)
                if question is None and known.outdated:
                    known.asked_at = time.monotonic()  # so not each time while the service is silent
                    fresh = self._questions[address] = _Question()
        if known is not None:
            self._deliver((token,), known.group)
        if fresh is not None:
            self._http.run(self._ask(address, fresh))
        return token

    def holds(self, address: str, group: Group) -> bool:
        """Whether ``lookup`` would answer with this very group, and ask nobody. Without a lock: it is asked under that of the rooms, which
        a finalizer may want in the middle of any call here."""
        known = self._groups.get(address)
        return known is not None and known.group is group and not known.outdated

    def drop(self, token: int) -> None:
        """Stop waiting: the callback of that lookup is not called any more, unless it is running just now. Idempotent."""
        with self._lock:
            self._waiting.pop(token, None)

    def forget(self, address: str, used: Group | None = None) -> None:
        """Drop the cached group of ``address``; with ``used`` only if it is that one and not a newer (P4)."""
        with self._lock:
            known = self._groups.get(address)
            if known is not None and used in (None, known.group):
                del self._groups[address]

    def last_error(self, address: str) -> str | None:
        """Why ``address`` has not answered so far; None if nobody waits for it or it has not been tried yet. As ``holds``."""
        question = self._questions.get(address)
        return question.error if question is not None else None

    def sizes(self) -> dict[str, int]:
        """Entries held: ``lookups`` (one per waiting caller), ``questions`` and ``groups`` (one per address)."""
        with self._lock:
            return {"lookups": len(self._waiting), "questions": len(self._questions), "groups": len(self._groups)}

    async def _ask(self, address: str, question: _Question) -> None:
        for delay in _delays():
            outcome = await self._attempt(address)
            if isinstance(outcome, str):
                self._note(address, question, outcome)
            else:
                self._deliver(self._answered(address, question, outcome), outcome)
            if isinstance(outcome, Group):
                return
            # Also after a failure, so that asking again and again stays within the back-off.
            await asyncio.sleep(delay)
            if self._abandoned(address, question):
                return

    async def _attempt(self, address: str) -> Group | LookupFailure | str:
        """The answer, or a text if there is none yet."""
        try:
            answer = await self._http.request("GET", parse(address, "prefill"), GROUP_PATH)
        except ConfigError as error:
            return LookupFailure(address, str(error))
        except ConnectionError as error:
            return str(error)
        except Exception as error:
            log.exception("asking %s for its group failed; trying on", address)
            return cause(error)
        if answer.status >= 500:
            return error_text(answer.body) or f"answered {answer.status}"
        if answer.status != 200:
            hint = "has the group that token?" if answer.status == 401 else "is this a prefill group's address?"
            return LookupFailure(address, f"answered {answer.status}: {error_text(answer.body)}; {hint}")
        try:
            return read(answer.body, Group)
        except ValueError as error:
            return LookupFailure(address, f"answered what is not a group ({error}); is this a prefill group's address?")

    def _note(self, address: str, question: _Question, error: str) -> None:
        if question.error is None and question.tokens:
            log.info("bootstrap service %s: no group yet (%s); asking on", address, error)
        question.error = error

    def _answered(self, address: str, question: _Question, outcome: Group | LookupFailure) -> list[int]:
        """File the outcome and take everybody who waits for it."""
        with self._lock:
            tokens, question.tokens = sorted(question.tokens), set()
            if isinstance(outcome, LookupFailure):
                question.error = outcome.reason
                return tokens
            del self._questions[address]
            self._groups[address] = _Known(outcome, time.monotonic())
            if len(self._groups) > MAX_CACHED_GROUPS:
                self._groups.popitem(last=False)
            return tokens

    def _abandoned(self, address: str, question: _Question) -> bool:
        """Whether nobody waits any more; the question is then gone."""
        with self._lock:
            question.tokens &= self._waiting.keys()
            if question.tokens:
                return False
            del self._questions[address]
            return True

    def _deliver(self, tokens: tuple[int, ...] | list[int], outcome: Group | LookupFailure) -> None:
        for token in tokens:
            with self._lock:
                on_result = self._waiting.pop(token, None)
            if on_result is None:
                continue
            try:
                on_result(outcome)
            except Exception:
                log.exception("callback of a lookup failed; the others are served")
