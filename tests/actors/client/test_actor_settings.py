"""Settings of hosts and clients."""

import pytest

from actors.config import ClientSettings, HostSettings
from contracts.config import load_settings
from contracts.errors import ConfigurationError


def test_a_host_has_a_name_of_its_own_by_default() -> None:
    settings = load_settings(HostSettings)

    assert settings.host_id == load_settings(HostSettings).host_id
    assert (settings.partitions, settings.overcommit, settings.closed_retention_ms) == (8, False, 3_600_000)


def test_what_only_a_host_reads_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDLINE_HOST_ID", "host-a")
    monkeypatch.setenv("WORLDLINE_OVERCOMMIT", "true")

    settings = load_settings(HostSettings, partitions=16)

    assert (settings.host_id, settings.overcommit, settings.partitions) == ("host-a", True, 16)
    load_settings(ClientSettings)  # other processes leave a host's settings alone


@pytest.mark.parametrize(
    ("name", "value"),
    [("host_id", "a b"), ("host_id", ""), ("partitions", 0), ("partitions", 5000)],
)
def test_a_bad_setting_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_settings(HostSettings, **{name: value})

    assert raised.value.field == name


def test_a_client_waits_as_long_as_a_tick_may_take() -> None:
    settings = load_settings(ClientSettings, queue_limit_ms=1_000, execution_limit_ms=2_000, lease_ms=500)

    assert settings.answer_timeout_s == 8.0
    assert settings.host_wait_s == 1.0
