"""The native back end against float64 torch, on every instruction set that this CPU runs."""

import threading
from collections.abc import Iterator

import pytest
import torch

from kernels import native, reference
from kernels.attention import PagedBatch
from tests.kernels.cases import Case, assert_close, make_case, pairwise, poisoned

ISAS = ("baseline", "avx2", "avx512", "avx512bf16")
BLOCK_SIZES = (8, 16, 32, 64)
HEAD_DIMS = (64, 96, 128, 256)
GROUPS = (1, 3, 4, 8)
DTYPES = (torch.float32, torch.bfloat16)

pytestmark = pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    best = native.features()
    if request.param not in best.runnable:
        pytest.skip(f"this CPU does not run {request.param}")
    native._library().choose_isa(request.param)
    yield request.param
    native._library().choose_isa(best.isa)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def attend(case: Case) -> torch.Tensor:
    """The native answer in an output that was NaN before."""
    out = poisoned(case.query)
    native.paged_attention(case.query, case.kv, case.batch, case.scale, out)
    return out


def expect(case: Case) -> torch.Tensor:
    """What float64 makes of the same inputs."""
    out = torch.empty(case.query.shape, dtype=torch.float64)
    reference.paged_attention(case.query.double(), case.kv.double(), case.batch, case.scale, out)
    return out


def part(case: Case, seq: int) -> tuple[Case, slice]:
    """The same problem with one sequence of the batch alone, and where its tokens were."""
    batch = case.batch
    start, stop = batch.query_starts[seq : seq + 2].tolist()
    alone = PagedBatch(
        block_tables=batch.block_tables[seq : seq + 1],
        query_starts=torch.tensor([0, stop - start], dtype=torch.int32),
        kv_lens=batch.kv_lens[seq : seq + 1],
        slots=batch.slots[start:stop],
        max_query_len=stop - start,
        max_kv_len=int(batch.kv_lens[seq]),
    )
    return Case(case.query[start:stop], case.kv, case.pool, alone, case.scale), slice(start, stop)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "group", "dtype"), pairwise(BLOCK_SIZES, HEAD_DIMS, GROUPS, DTYPES)
)
def test_decodes_and_chunks_in_one_batch(isa, seed, block_size, head_dim, group, dtype):
    edges = (1, block_size - 1, block_size, block_size + 1)
    decodes = [(1, n) for n in (*edges, 63, 64, 65, 700)]
    chunks = [(n, n) for n in edges] + [(2, 70), (3, 129), (30, 30), (40, 530), (200, 201)]
    case = make_case(
        decodes + chunks, seed=seed, block_size=block_size, group=group, head_dim=head_dim, dtype=dtype
    )
    assert_close(attend(case), expect(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 80, 112, 224])
def test_head_dims_that_only_narrower_vectors_divide(isa, seed, head_dim, dtype):
    assert native.supports(dtype, head_dim)
    case = make_case([(1, 300), (33, 100)], seed=seed, head_dim=head_dim, dtype=dtype)
    assert_close(attend(case), expect(case))


@pytest.mark.parametrize("block_size", [1, 4, 12, 128])
def test_block_sizes_that_do_not_fit_the_tile(isa, seed, block_size):
    case = make_case([(1, 300), (33, 100), (1, 5)], seed=seed, block_size=block_size)
    assert_close(attend(case), expect(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 71), (1, 128), (8, 2), (5, 5)])
def test_any_number_of_heads(isa, seed, kv_heads, group, dtype):
    case = make_case([(1, 600), (5, 90)], seed=seed, kv_heads=kv_heads, group=group, dtype=dtype)
    assert_close(attend(case), expect(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts_on_several_threads(two_threads, seed, dtype):
    case = make_case([(1, 9000), (20, 5000), (1, 256), (1, 257), (300, 4100)], seed=seed, dtype=dtype)
    assert_close(attend(case), expect(case))


def test_scores_far_from_zero_do_not_overflow(isa, seed):
    case = make_case([(1, 200), (40, 100)], seed=seed)
    case = Case(case.query * 300, case.kv, case.pool, case.batch, case.scale)
    # One weight is 1 and the others vanish, so what is compared is which key won.
    result, expected = attend(case), expect(case)
    assert result.isfinite().all()
    torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ramp", [(0.0, 60.0), (60.0, 0.0), (-60.0, 60.0)])
def test_scores_that_rise_or_fall_along_the_context(isa, seed, ramp, dtype):
    case = make_case([(1, 700), (2, 700), (9, 700), (25, 700)], seed=seed, kv_heads=1, dtype=dtype)
    case.query[..., 0] = 8.0
    for table in case.batch.block_tables:
        # In base e: what the first dimension adds to the score.
        added = torch.linspace(*ramp, 704).view(44, 16, 1)
        case.kv[table[:44].long(), 0, :, :, 0] = added.to(dtype)
    # Rounding of scores this large shows in the weights.
    loose = {torch.float32: 1e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(attend(case).double(), expect(case), rtol=loose, atol=loose)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_any_scale(isa, seed, scale, dtype):
    case = make_case([(1, 200), (3, 90), (40, 100)], seed=seed, dtype=dtype)
    case = Case(case.query, case.kv, case.pool, case.batch, scale)
    assert_close(attend(case), expect(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3])
def test_any_number_of_new_tokens(isa, seed, group, dtype):
    lengths = [(tokens, tokens + 61) for tokens in range(1, 40)]
    case = make_case(lengths, seed=seed, kv_heads=3, group=group, head_dim=32, dtype=dtype)
    assert_close(attend(case), expect(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_is_not_a_number_spoils_no_other(isa, seed, dtype):
    case = make_case([(30, 300)], seed=seed, dtype=dtype)
    expected = expect(case)
    case.query[7, 2] = torch.nan
    result = attend(case)
    assert result[7, 2].isnan().all()
    others = torch.ones(result.shape[:2], dtype=torch.bool)
    others[7, 2] = False
    assert_close(result[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_gets_the_same_bits_alone_and_in_any_batch(isa, seed, dtype):
    lengths = [(1, 40), (1, 3000), (50, 600), (1, 300), (7, 1500), (120, 120), (1, 1)]
    case = make_case(lengths, seed=seed, kv_heads=3, dtype=dtype)
    together = attend(case)
    for seq in range(len(lengths)):
        alone, tokens = part(case, seq)
        assert torch.equal(attend(alone), together[tokens])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_does_not_change_a_bit(two_threads, seed, dtype):
    case = make_case(
        [(1, 3000), (5, 700), (20, 2000), (150, 900), (1, 20)], seed=seed, kv_heads=4, dtype=dtype
    )
    on_two = attend(case)
    torch.set_num_threads(1)
    assert torch.equal(attend(case), on_two)


def test_output_may_be_strided_and_keeps_what_lies_between(seed):
    case = make_case([(1, 50), (20, 60)], seed=seed)
    wide = torch.full((case.query.size(0), case.query.size(1) + 2, 64 + 8), 7.0)
    out = wide[:, 1:-1, :64]
    native.paged_attention(case.query, case.kv, case.batch, case.scale, out)
    assert_close(out, expect(case))
    assert (wide[:, 0] == 7).all()
    assert (wide[:, -1] == 7).all()
    assert (wide[..., 64:] == 7).all()


def test_offsets_beyond_32_bits():
    block_size, kv_heads, head_dim = 16, 2, 64
    per_block = 2 * block_size * kv_heads * head_dim
    blocks = 2**31 // per_block + 10
    # Never touched but for two blocks, so this is address space, not memory.
    kv = torch.empty(blocks, 2, block_size, kv_heads, head_dim, dtype=torch.bfloat16)
    near = make_case([(1, 20)], seed=1, kv_heads=kv_heads, dtype=torch.bfloat16)
    table = torch.tensor([[blocks - 1, blocks - 3]], dtype=torch.int32)
    kv[table[0].long()] = near.kv[near.batch.block_tables[0, :2].long()]
    batch = PagedBatch(table, near.batch.query_starts, near.batch.kv_lens, near.batch.slots, 1, 20)
    assert torch.equal(attend(Case(near.query, kv, kv, batch, near.scale)), attend(near))
    token = torch.randn(1, kv_heads, head_dim).bfloat16()
    native.write_kv(token, token * 2, kv, torch.tensor([(blocks - 1) * block_size + 5]))
    assert torch.equal(kv[-1, :, 5], torch.stack([token[0], token[0] * 2]))


def test_a_batch_whose_tensors_change_in_place_is_read_anew(seed):
    case = make_case([(1, 40), (1, 90)], seed=seed)
    attend(case)
    case.batch.kv_lens[1] = 41
    assert_close(attend(case), expect(case))


def test_nothing_to_do(seed):
    empty = PagedBatch(
        block_tables=torch.zeros(0, 1, dtype=torch.int32),
        query_starts=torch.zeros(1, dtype=torch.int32),
        kv_lens=torch.zeros(0, dtype=torch.int32),
        slots=torch.zeros(0, dtype=torch.int64),
        max_query_len=0,
        max_kv_len=0,
    )
    case = make_case([(1, 1)], seed=seed)
    native.paged_attention(case.query[:0], case.kv, empty, 1.0, case.query[:0])


def test_calls_from_several_python_threads_do_not_disturb_each_other(seed):
    cases = [make_case([(1, 700 + 10 * i), (40, 100 + i)], seed=seed + i) for i in range(4)]
    expected = [attend(case) for case in cases]
    wrong = []

    def work(index: int) -> None:
        for _ in range(30):
            if not torch.equal(attend(cases[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 500])
def test_write_puts_each_token_into_its_slot_and_nothing_else(two_threads, seed, dtype, tokens):
    torch.manual_seed(seed)
    fused = torch.randn(tokens, 10, 64).to(dtype)
    key, value = fused[:, 4:7], fused[:, 7:10]
    pool = torch.full((70, 3, 2, 8, 3, 64), 7.0, dtype=dtype)
    expected = pool.clone()
    slots = torch.randperm(70 * 8)[:tokens]
    native.write_kv(key, value, pool[:, 1], slots)
    reference.write_kv(key, value, expected[:, 1], slots)
    assert torch.equal(pool, expected)


def test_what_is_not_supported_is_said():
    assert native.supports(torch.float32, 64)
    assert native.supports(torch.bfloat16, 256)
    assert not native.supports(torch.float32, 264)
    assert not native.supports(torch.float32, 60)
    assert not native.supports(torch.float32, 0)
    assert not native.supports(torch.float64, 64)


def test_strided_batch_tensors_are_refused_by_name(seed):
    case = make_case([(1, 40), (1, 90)], seed=seed)
    wide = torch.zeros(2, 2, dtype=torch.int32)
    batch = PagedBatch(case.batch.block_tables, case.batch.query_starts, wide[:, 0], case.batch.slots, 1, 90)
    with pytest.raises(ValueError, match="kv_lens must be dense"):
        native.paged_attention(case.query, case.kv, batch, case.scale, poisoned(case.query))
