import pytest

from engine.config import ConfigError, EngineConfig
from engine.memory import MAX_DEFAULT_CPU_BYTES, MemoryPlan, default_cpu_bytes, free_memory, plan_memory


def plan(config: EngineConfig, *, free_bytes: int = 100_000, model_max_len: int = 2048) -> MemoryPlan:
    return plan_memory(config, block_bytes=1000, free_bytes=free_bytes, model_max_len=model_max_len)


def test_the_pool_takes_what_is_free() -> None:
    assert plan(EngineConfig(), free_bytes=500_999).num_blocks == 500


def test_kv_memory_is_a_hard_limit_in_bytes() -> None:
    assert plan(EngineConfig(kv_memory=20_999)).num_blocks == 20


def test_num_blocks_wins_over_free_memory() -> None:
    assert plan(EngineConfig(num_blocks=7)).num_blocks == 7


def test_the_models_own_context_is_lowered_to_the_pool_and_said_so() -> None:
    assert plan(EngineConfig(num_blocks=11)) == MemoryPlan(11, 160, lowered=True)
    assert plan(EngineConfig(num_blocks=200)) == MemoryPlan(200, 2048, lowered=False)


def test_a_context_asked_for_beyond_the_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len: expected at most 160"):
        plan(EngineConfig(num_blocks=11, max_model_len=161))
    assert plan(EngineConfig(num_blocks=11, max_model_len=160)).max_model_len == 160


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len: expected at most the model's own 2048"):
        plan(EngineConfig(num_blocks=1000, max_model_len=2049))


def test_too_little_memory_for_two_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_memory"):
        plan(EngineConfig(), free_bytes=1999)


def test_the_cpu_default_is_bounded() -> None:
    assert 0 < default_cpu_bytes() <= min(MAX_DEFAULT_CPU_BYTES, free_memory())
