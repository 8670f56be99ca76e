import socket
import threading

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Output, PromptUsage
from engine.ipc import (
    MAX_FRAME_BYTES,
    Channel,
    FrameDecoder,
    FrameError,
    encode_frame,
    pack_output,
    unpack_output,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
messages = st.dictionaries(st.text(max_size=5), values, max_size=3).map(lambda fields: fields | {"type": "x"})


@given(st.lists(messages, max_size=4), st.data())
def test_messages_arrive_whole_however_the_bytes_are_cut(
    sent: list[dict[str, object]], data: st.DataObject
) -> None:
    stream = b"".join(encode_frame(message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    decoder = FrameDecoder()
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += decoder.feed(stream[start:end])
    assert received == sent


@given(st.binary(max_size=60))
def test_garbage_is_either_waited_on_or_refused_never_taken_for_a_message(garbage: bytes) -> None:
    decoder = FrameDecoder()
    try:
        received = decoder.feed(garbage)
    except FrameError:
        return
    for message in received:
        assert isinstance(message["type"], str)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x90", b"\x80", msgpack.packb({"type": 1}), msgpack.packb({}) * 2]
)
def test_a_frame_that_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        FrameDecoder().feed(len(body).to_bytes(4, "big") + body)


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(FrameError, match="limit"):
        FrameDecoder().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "output",
    [
        Output("a", [1, 2]),
        Output("a", [], "abort"),
        Output("b", [3], "length", PromptUsage(5, 2, 3)),
        Output("b", [], "error", None, "it broke"),
    ],
)
def test_an_output_survives_the_wire(output: Output) -> None:
    assert unpack_output(msgpack.unpackb(msgpack.packb(pack_output(output)))) == output


def test_receiving_without_waiting_returns_at_once() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours)
        assert channel.receive() == []
        theirs.sendall(encode_frame({"type": "x"}))
        assert channel.receive() == [{"type": "x"}]
        assert not channel.closed
        channel.close()


def test_sending_never_waits_for_a_slow_reader_and_loses_nothing() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    big = "x" * 100_000
    for number in range(50):  # far more than a socket buffers, and nobody reads
        channel.send({"type": "x", "number": number, "big": big})
    received: list[int] = []

    def read_all() -> None:
        decoder = FrameDecoder()
        while data := theirs.recv(1 << 16):
            received.extend(message["number"] for message in decoder.feed(data))

    reader = threading.Thread(target=read_all)
    reader.start()
    channel.flush()
    channel.close()
    reader.join()
    theirs.close()
    assert received == list(range(50))


def test_what_is_unsent_leaves_while_the_engine_sleeps() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    channel.send({"type": "x", "big": "x" * 5_000_000})

    def read_then_answer() -> None:
        decoder = FrameDecoder()
        while not decoder.feed(theirs.recv(1 << 16)):
            pass
        theirs.sendall(encode_frame({"type": "thanks"}))

    reader = threading.Thread(target=read_then_answer)
    reader.start()
    assert channel.receive(wait=True) == [{"type": "thanks"}]
    reader.join()
    channel.close()
    theirs.close()


def test_a_gone_peer_is_noticed_by_receive_and_by_send() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.close()
    assert channel.receive(wait=True) == []
    assert channel.closed
    channel.close()

    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.close()
    channel.send({"type": "x"})
    assert channel.closed
    channel.close()
