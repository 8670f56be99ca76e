"""The one signature: what it refuses, and which back end it takes."""

import sys
import types

import pytest
import torch

from kernels import attention
from tests.kernels.cases import assert_close, make_case
from tests.kernels.naive import naive_attention

CASE = make_case([(1, 9), (2, 20)], seed=0)
QUERY, KV, BATCH = CASE.query, CASE.kv, CASE.batch
KEY = torch.zeros(3, 2, 64)


def attend(query=QUERY, kv=KV, out=None, backend="torch"):
    return attention.paged_attention(query, kv, BATCH, scale=0.125, out=out, backend=backend)


def write(key=KEY, value=KEY, kv=KV, slots=BATCH.slots, backend="torch"):
    attention.write_kv(key, value, kv, slots, backend=backend)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attend(query=QUERY.flatten(1)), r"query must be \[tokens, q_heads, head_dim\]"),
        (lambda: attend(query=QUERY.transpose(1, 2)), r"query must be \[tokens, q_heads, head_dim\]"),
        (lambda: attend(query=QUERY.half()), "query must have the dtype and head_dim of kv"),
        (lambda: attend(query=QUERY[:, :5]), "a multiple of its heads"),
        (lambda: attend(query=QUERY[..., :32]), "query must have the dtype and head_dim of kv"),
        (lambda: attend(kv=CASE.pool), "kv must be one layer's"),
        (lambda: attend(kv=KV[:, :1]), "kv must be one layer's"),
        (lambda: attend(kv=KV.transpose(3, 4)), "kv must be one layer's"),
        (lambda: attend(out=torch.empty(3, 6, 63)), "out must be like query"),
        (lambda: attend(out=torch.empty(3, 6, 64, dtype=torch.float64)), "out must be like query"),
        (lambda: attend(out=torch.empty(3, 64, 6).transpose(1, 2)), "out must be like query"),
        (lambda: attend(backend="gpu"), "backend must be one of triton, native, torch or None, got 'gpu'"),
        (lambda: write(key=KEY[:, :1]), "key must be"),
        (lambda: write(key=KEY.double()), "key must be"),
        (lambda: write(key=torch.zeros(3, 64, 2).transpose(1, 2)), "key must be"),
        (lambda: write(value=KEY[:2]), "value must be like key"),
        (lambda: write(value=KEY.double()), "value must be like key"),
        (lambda: write(kv=CASE.pool), "kv must be one layer's"),
        (lambda: write(slots=BATCH.slots[:2]), r"slots must be int64 \[3\]"),
        (lambda: write(slots=BATCH.slots.int()), r"slots must be int64 \[3\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.fixture
def native(monkeypatch):
    """A stand-in for the native back end that says which calls reached it."""
    module = types.ModuleType("kernels.native")
    module.calls = []
    module.available = lambda: True
    module.supports = lambda dtype, head_dim: dtype == torch.float32 and head_dim == 64
    module.paged_attention = lambda query, kv, batch, scale, out: module.calls.append("paged_attention")
    module.write_kv = lambda key, value, kv, slots: module.calls.append("write_kv")
    monkeypatch.setitem(sys.modules, "kernels.native", module)
    forget()
    yield module
    forget()


def forget():
    attention.pick_backend.cache_clear()
    attention._load.cache_clear()


def test_native_serves_a_cpu_by_itself(native):
    attend(backend=None)
    write(backend=None)
    assert native.calls == ["paged_attention", "write_kv"]
    assert attention.pick_backend("cpu", torch.float32) == "native"
    assert attention.pick_backend(torch.device("cpu"), torch.float32, 64) == "native"


def test_torch_takes_over_where_native_cannot(native):
    assert attention.pick_backend("cpu", torch.float64) == "torch"
    assert attention.pick_backend("cpu", torch.float32, 80) == "torch"
    native.available = lambda: False
    forget()
    assert attention.pick_backend("cpu", torch.float32) == "torch"
    assert_close(attend(backend=None), naive_attention(QUERY, KV, BATCH, 0.125))
    assert native.calls == []


def test_native_asked_for_by_name_must_be_possible(native):
    with pytest.raises(ValueError, match=r"'native' does not support torch.float64 with head_dim 64"):
        attend(query=QUERY.double(), kv=KV.double(), backend="native")
    native.available = lambda: False
    with pytest.raises(ValueError, match="'native' is not available"):
        attend(backend="native")


def test_triton_serves_a_gpu_where_it_can(monkeypatch):
    forget()
    assert attention.pick_backend("cuda", torch.bfloat16) == "triton"
    assert attention.pick_backend(torch.device("cuda", 1), torch.float32) == "triton"
    assert attention.pick_backend("cuda", torch.float64) == "torch"
    assert attention.pick_backend("mps", torch.float32) == "torch"
    forget()
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
    assert attention.pick_backend("cuda", torch.bfloat16) == "torch"
    forget()
