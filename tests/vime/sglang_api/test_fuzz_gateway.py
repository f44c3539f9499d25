"""Generated bodies for the gateway's routes are either passed on unchanged, or a ValueError names the fault."""

from __future__ import annotations

import json
from collections.abc import Callable

from hypothesis import strategies as st

from slime.peers.proof import proof
from vime.sglang_api.gateway import with_model, wrap
from vime.sglang_api.request import WRAPPED, GenerateFields, SamplingFields, parse

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(), max_size=5)
)
HALVES = st.sampled_from(["\ud83d", "\udc00a", "\x00"])
VALUES = st.recursive(
    LEAVES | HALVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


def body_of(
    fields: tuple[str, ...], inner: st.SearchStrategy[object]
) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(st.sampled_from(fields) | st.text(max_size=4), inner, max_size=5)


SAMPLING = body_of(SamplingFields.__struct_fields__, VALUES)
GENERATE = body_of(GenerateFields.__struct_fields__, VALUES | SAMPLING)
DEEP = st.sampled_from([b"[" * 9000, b'{"text":' * 9000, b'{"text":' + b"[" * 9000])
BODIES = (GENERATE | VALUES).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40) | DEEP


def test_any_body_of_generate_is_carried_on_or_refused(fuzz: Callable[..., None]) -> None:
    def check(body: bytes) -> None:
        for read in (wrap, parse):
            try:
                found = read(body)
            except ValueError as error:
                assert str(error)
            else:
                if read is wrap:
                    assert isinstance(found, bytes) and body in found and WRAPPED.encode() in found

    fuzz(check, BODIES)


def test_any_body_of_vllm_s_routes_stays_or_gets_the_adapter(fuzz: Callable[..., None]) -> None:
    def check(body: bytes) -> None:
        found = with_model(body, "maths")
        assert found == body or json.loads(found)["model"] == "maths"

    models = st.fixed_dictionaries({}, optional={"model": st.sampled_from([None, "policy", "code", 3])})
    named = st.builds(lambda one, other: json.dumps({**one, **other}).encode(), SAMPLING, models)
    fuzz(check, named | BODIES)


def test_any_challenge_is_answered_or_refused(fuzz: Callable[..., None]) -> None:
    def check(challenge: str) -> None:
        try:
            assert len(proof("key", challenge, "127.0.0.1", 1)) == 64
        except ValueError as error:
            assert str(error)

    digits = st.text(st.sampled_from("0123456789abcdefABCDEF \n\ud83d١"), min_size=62, max_size=66)
    fuzz(check, digits | st.text(st.characters(), max_size=64))
