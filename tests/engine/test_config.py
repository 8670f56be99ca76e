import subprocess
import sys
from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5g", 1_500_000_000),
        ("100 kB", 100_000),
        ("64ki", 65536),
        ("12345", 12345),
        (12345, 12345),
    ],
)
def test_sizes_are_read_in_both_unit_systems(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 GiBs", "two", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", " "),
        ("model", 3),
        ("served_model_name", ""),
        ("dtype", "int3"),
        ("device", "cuda:x"),
        ("device", 0),
        ("block_size", 24),
        ("block_size", 4),
        ("kv_memory", "lots"),
        ("kv_memory", 0),
        ("kv_memory", [1]),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", True),
        ("max_num_seqs", 0),
        ("max_num_seqs", 2.0),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", 63),
        ("max_model_len", 1),
        ("num_blocks", 1),
        ("threads", 0),
        ("seed", "x"),
        ("enable_prefix_caching", "yes"),
        ("check_integrity", 1),
        ("no_such_setting", 1),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: ") as caught:
        EngineConfig.from_dict({field: value})
    assert caught.value.field == field


def test_a_pool_is_sized_in_bytes_or_in_blocks_but_not_both() -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        EngineConfig(num_blocks=10, kv_memory="1GiB")


def test_a_config_survives_the_way_to_the_engine_process() -> None:
    config = EngineConfig(model="m", kv_memory="1GiB", max_num_seqs=3, threads=2)
    assert EngineConfig.from_dict(config.to_dict()) == config
    assert config.kv_memory == 2**30


def test_the_front_side_imports_without_torch() -> None:
    code = (
        "import sys, engine, engine.client, engine.config\n"
        "assert engine.SamplingParams(max_tokens=1)\n"
        "loaded = {'torch', 'transformers', 'starlette', 'redis'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
