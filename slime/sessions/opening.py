"""Opens a session for the time that an agent runs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from argparse import Namespace
from collections.abc import AsyncIterator
from weakref import WeakKeyDictionary

from slime.hooks import load_function
from slime.rollout import state
from slime.sessions.limits import DONE, SessionLimits
from slime.sessions.messages import ChatParser, PlainParser
from slime.sessions.server import SessionServer, server_of_loop
from slime.sessions.session import MODEL, Session
from slime.types import Sample, SamplingParams
from slime.user_code import is_cancelled

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def open_session(
    args: Namespace,
    sample: Sample,
    sampling_params: SamplingParams | None = None,
    *,
    limits: SessionLimits | None = None,
    parser: ChatParser | None = None,
) -> AsyncIterator[Session]:
    """A session of `sample`, which an agent can use until the block ends.

    `sampling_params` default to those of training samples, `limits` to the --session flags, and `parser`, which finds
    reasoning and tool calls, to the backend's. A session that a limit or a bad request has ended ends the block too: an
    error of the agent that follows from it is not raised. Any other error is. After the block, `Session.samples` has
    what became of it.
    """
    own = state.of_process(args)
    limits = SessionLimits.of(args) if limits is None else limits
    params = own.sampling_params if sampling_params is None else sampling_params
    server, session = await begin(args, own, sample, params, limits, parser=parser)
    try:
        async with asyncio.timeout(limits.seconds) as clock:
            yield session
    except BaseException as error:
        if clock.expired():
            session.end("time", limits.too_late)
        elif is_cancelled(error) or session.ended is None:
            raise
        logger.debug("session %s ended: %s", session.id, session.ended, exc_info=error)
    finally:
        server.remove(session)
        session.end(DONE)
    if session.fault is not None:
        raise session.fault


async def begin(
    args: Namespace,
    own: state.GenerateState,
    sample: Sample,
    params: SamplingParams,
    limits: SessionLimits,
    *,
    parser: ChatParser | None = None,
    model: str | None = MODEL,
) -> tuple[SessionServer, Session]:
    """A session, and the server that serves it until it is taken away. To be awaited in the loop of `own`."""
    server = await server_of_loop(own.at_close)
    parser = await _parser_of(args, own) if parser is None else parser
    session = Session(args, own, sample, params, limits, parser, model)
    server.add(session)
    return server, session


_parsers: WeakKeyDictionary[state.GenerateState, asyncio.Task[ChatParser]] = WeakKeyDictionary()


async def _parser_of(args: Namespace, own: state.GenerateState) -> ChatParser:
    """The parser that the backend gives, one per process; else the plain one. Made in a thread, because it may import
    the engine's project."""
    if own not in _parsers:
        path: str | None = getattr(args, "chat_parser_path", None)
        make = PlainParser if path is None else functools.partial(load_function(path), args, own.tokenizer)
        _parsers[own] = asyncio.create_task(asyncio.to_thread(make))
    return await asyncio.shield(_parsers[own])
