"""Sessions connect agents with the engine: an unmodified client sends HTTP requests, and its tokens become samples.

async def generate(args, sample, sampling_params):
    async with open_session(args, sample, sampling_params) as session:
        await my_agent(session.base_url, session.api_key, session.model, sample.prompt)
    return session.samples()
"""

from slime.sessions.limits import SessionLimits
from slime.sessions.opening import open_session
from slime.sessions.session import Session

__all__ = ["Session", "SessionLimits", "open_session"]
