from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.core.errors import InvalidConfig
from paceline.server.config.config import GatewayConfig, ServerConfig, load_gateway_config

CLUSTER = {
    "pools": [
        {"name": "draft", "role": "draft", "model": "small"},
        {"name": "target", "role": "target", "model": "big", "limits": {"max_num_seqs": 7}},
    ],
    "gateway": {"port": 9000, "sampling": {"temperature": 0.5}},
}


def written(folder: Path, document: Any) -> Path:
    path = folder / "file.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_file_without_pools_is_a_servers(tmp_path: Path) -> None:
    config = load_gateway_config(written(tmp_path, {"model": "big", "port": 9000}), {}, {})
    assert isinstance(config, ServerConfig)
    assert (config.engine.model, config.port) == ("big", 9000)
    assert isinstance(load_gateway_config(None, {}, {}), ServerConfig)


def test_a_file_with_pools_is_a_clusters(tmp_path: Path) -> None:
    config = load_gateway_config(written(tmp_path, CLUSTER), {"PACELINE_MAX_WAITING": "3"}, {"port": "9001"})
    assert isinstance(config, GatewayConfig)
    assert (config.server.port, config.server.max_waiting, config.server.sampling.temperature) == (9001, 3, 0.5)
    assert config.server.model_name == "big"
    assert config.server.engine.max_num_seqs == 7


@pytest.mark.parametrize(
    ("gateway", "environ", "options"),
    [
        ({"model": "other"}, {}, {}),
        ({}, {"PACELINE_DEVICE": "cpu"}, {}),
        ({}, {}, {"speculation.max_depth": "3"}),
    ],
)
def test_settings_of_engines_belong_to_pools(
    tmp_path: Path, gateway: dict[str, Any], environ: dict[str, str], options: dict[str, str]
) -> None:
    with pytest.raises(InvalidConfig, match="belong to them"):
        load_gateway_config(written(tmp_path, CLUSTER | {"gateway": gateway}), environ, options)


def test_one_address_for_the_traces_of_all(tmp_path: Path) -> None:
    url = "http://127.0.0.1:4318"
    config = load_gateway_config(written(tmp_path, CLUSTER | {"trace_endpoint": url}), {}, {})
    assert isinstance(config, GatewayConfig)
    assert (config.cluster.trace_endpoint, config.server.trace_endpoint) == (url, url)
    own = load_gateway_config(
        written(tmp_path, CLUSTER | {"trace_endpoint": url}), {}, {"trace_endpoint": "http://other:1"}
    )
    assert isinstance(own, GatewayConfig)
    assert own.server.trace_endpoint == "http://other:1"
    with pytest.raises(InvalidConfig, match="trace_endpoint must be a URL"):
        load_gateway_config(written(tmp_path, CLUSTER | {"trace_endpoint": "collector"}), {}, {})


def test_mistakes_say_where_they_stand(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="did you mean 'port'"):
        load_gateway_config(written(tmp_path, CLUSTER | {"gateway": {"prt": 1}}), {}, {})
    with pytest.raises(InvalidConfig, match=r"file.yaml: unknown key 'hots'"):
        load_gateway_config(written(tmp_path, CLUSTER | {"hots": 1}), {}, {})
    with pytest.raises(InvalidConfig, match="mapping"):
        load_gateway_config(written(tmp_path, ["pools"]), {}, {})


def test_folders_are_relative_to_the_file(tmp_path: Path) -> None:
    config = load_gateway_config(written(tmp_path, CLUSTER | {"keys": "keys", "state_dir": "/var/state"}), {}, {})
    assert isinstance(config, GatewayConfig)
    assert (config.cluster.keys, config.cluster.state_dir) == (str(tmp_path / "keys"), "/var/state")
