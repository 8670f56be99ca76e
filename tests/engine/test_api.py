"""The records cross the process border whole."""

import msgpack

from engine.api import GenerateRequest, SamplingParams, pack_record, unpack_request


def test_a_request_comes_back_as_it_was_sent() -> None:
    sampling = SamplingParams(temperature=0.5, stop=("a", "b"), stop_token_ids=(7,), seed=3, max_tokens=None)
    request = GenerateRequest("r", [1, 2, 3], sampling, tenant="t", branch="b", generate=False)
    assert unpack_request(msgpack.unpackb(msgpack.packb(pack_record(request)))) == request


def test_packing_does_not_go_through_the_prompt() -> None:
    request = GenerateRequest("r", [1, 2, 3])
    assert pack_record(request)["prompt_ids"] is request.prompt_ids
