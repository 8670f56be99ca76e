import json
from pathlib import Path
from typing import Any

import pytest

from app.config import Settings, SettingsError, load_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("PAGETURNER_"):
            monkeypatch.delenv(name)


def test_the_command_line_wins_over_variables_over_the_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pageturner.toml"
    file.write_text('port = 1\nblock_size = 32\nmax_num_seqs = 5\nallowed_hosts = ["a", "b"]\n')
    monkeypatch.setenv("PAGETURNER_PORT", "2")
    monkeypatch.setenv("PAGETURNER_MAX_NUM_SEQS", "6")
    settings = load_settings({"port": "3", "host": None}, config=file)
    assert (settings.port, settings.max_num_seqs, settings.block_size) == (3, 6, 32)
    assert (settings.host, settings.allowed_hosts) == ("127.0.0.1", ("a", "b"))


def test_a_variable_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.toml"
    file.write_text("port = 4\n")
    monkeypatch.setenv("PAGETURNER_CONFIG", str(file))
    assert load_settings().port == 4


def test_engine_settings_reach_the_engine() -> None:
    engine = load_settings(
        {"block_size": "32", "kv_memory": "64MiB", "max_model_len": "100", "enable_prefix_caching": False}
    ).engine
    assert (engine.block_size, engine.kv_memory, engine.max_model_len) == (32, 64 * 2**20, 100)
    assert engine.enable_prefix_caching is False


def test_keys_come_as_a_list_or_separated_by_commas_or_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings({"api_key": ["a", "b"]}).keys == ("a", "b")
    monkeypatch.setenv("PAGETURNER_API_KEY", "c, d")
    assert load_settings().keys == ("c", "d")
    monkeypatch.delenv("PAGETURNER_API_KEY")
    secret = tmp_path / "key"
    secret.write_text("from-file\n")
    monkeypatch.setenv("PAGETURNER_API_KEY_FILE", str(secret))
    assert load_settings().keys == ("from-file",)


def test_empty_variables_are_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETURNER_API_KEY", "")
    monkeypatch.setenv("PAGETURNER_MODEL", "")
    settings = load_settings()
    assert (settings.keys, settings.model) == ((), None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": "x"}, "port: Input should be a valid integer"),
        ({"port": "70000"}, "port: Input should be less than or equal to 65535"),
        ({"block_size": "7"}, "block_size: expected 8, 16, 32, 64 or 128, got 7"),
        ({"dtype": "int3"}, "dtype: expected one of auto, float32, bfloat16, float16, got 'int3'"),
        (
            {"log_level": "loud"},
            "log_level: Input should be 'debug', 'info', 'warning' or 'error' (",
        ),
        ({"host": "0.0.0.0"}, "host: 0.0.0.0 can be reached from other machines and no api_key is set"),
        ({"host": "::"}, "host: :: can be reached from other machines"),
        ({"host": "example.com"}, "host: example.com can be reached from other machines"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(given)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["prt = 1\n", 'port = "x"\n', "port = \n"])
def test_a_wrong_file_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(config=file)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="config: there is no file"):
        load_settings(config=tmp_path / "none.toml")


def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETURNER_PROT", "1")
    with pytest.raises(SettingsError, match="PAGETURNER_PROT: there is no such setting"):
        load_settings()


@pytest.mark.parametrize("given", [{"api_key": ["k"]}, {"insecure": True}])
def test_other_machines_may_connect_with_a_key_or_when_told_so(given: dict[str, Any]) -> None:
    assert load_settings({"host": "0.0.0.0", **given}).host == "0.0.0.0"


def test_secrets_are_never_shown() -> None:
    settings = Settings(api_key=("topsecret",), redis_url="redis://:topsecret@host")  # type: ignore[arg-type]
    assert "topsecret" not in repr(settings)
    assert "topsecret" not in json.dumps(settings.redacted())


def test_without_a_key_only_known_host_names_are_answered() -> None:
    assert "*" not in Settings().hosts
    assert "127.0.0.1" in Settings().hosts
    assert Settings(api_key=("k",)).hosts == ("*",)  # type: ignore[arg-type]
    assert Settings(allowed_hosts=("chat.example",)).hosts == ("chat.example",)
