"""Opens a session for the time that an agent runs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from argparse import Namespace
from collections.abc import AsyncIterator

from slime.event_loop import loop_objects
from slime.hooks import load_function
from slime.rollout.context import RunContext, find_context
from slime.sessions.limits import DONE, SessionLimits
from slime.sessions.messages import ChatParser, PlainParser
from slime.sessions.server import SessionServer, get_loop_server
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
    """Opens a session of `sample`, which an agent can use until the block ends.

    `sampling_params` default to those of training samples, `limits` to the --session flags, and `parser`, which finds
    reasoning and tool calls, to the backend's parser. If a limit or a bad request has ended the session, errors of the
    agent are not raised, because they follow from that end. Any other error is raised. After the block,
    `Session.samples` returns the samples.
    """
    context = find_context(args)
    limits = SessionLimits.of(context.config.sessions) if limits is None else limits
    params = context.run.sampling_params if sampling_params is None else sampling_params
    server, session = await begin(context, sample, params, limits, parser=parser)
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
    context: RunContext,
    sample: Sample,
    params: SamplingParams,
    limits: SessionLimits,
    *,
    parser: ChatParser | None = None,
    model: str | None = MODEL,
) -> tuple[SessionServer, Session]:
    """Returns a session, and the server that serves it until it is removed. Must be awaited in the run's loop."""
    server = await get_loop_server(context.config.sessions.session_host)
    parser = await _get_parser(context) if parser is None else parser
    session = Session(context, sample, params, limits, parser, model)
    server.add(session)
    return server, session


async def _get_parser(context: RunContext) -> ChatParser:
    """Returns the parser of the rollout backend, one per run, or else the plain one.

    A thread makes it, because it may import the engine's project.
    """
    path = context.run.chat_parser_path
    make = (
        PlainParser
        if path is None
        else functools.partial(load_function(path), context.config, context.run.tokenizer)
    )
    made = loop_objects().get(_get_parser, lambda: asyncio.create_task(asyncio.to_thread(make)))
    return await asyncio.shield(made)
