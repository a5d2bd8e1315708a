"""Settings from defaults, file, environment and command line; errors report the source."""

import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.errors import InvalidConfig
from paceline.deploy.load import load_config, load_gateway_config
from paceline.deploy.processes.cluster_file import load_cluster
from paceline.gateway.config.config import SETTINGS, GatewayConfig, SamplingDefaults, ServerConfig
from paceline.gateway.config.settings import SWITCHES
from paceline.policy.depth.observation import DepthCandidate
from paceline.policy.depth.rules import make_breaker, make_depth

DOCS = Path(__file__).parents[3] / "docs"

TEMPLATE = """\
    # vLLM Speculative Decoding Configuration
    model: meta-llama/Llama-3-70B-Instruct
    speculative_model: meta-llama/Llama-3-8B-Instruct
    num_speculative_tokens: 8
    draft_acceptance_threshold: 0.65
    enable_prefix_caching: true
    gpu_memory_utilization: 0.85
    tensor_parallel_size: 2
    dtype: float16
    # Client-side orchestration overrides
    orchestration:
      adaptive_draft: true
      min_draft_length: 2
      max_draft_length: 16
      fallback_after_low_acceptance: 3
    sampling:
      temperature: 0.7
      top_p: 0.9
      top_k: 50
    """
"""A published configuration file of another server."""


def write(folder: Path, text: str) -> Path:
    path = folder / "paceline.yaml"
    path.write_text(textwrap.dedent(text), "utf-8")
    return path


def load_error(*arguments: Any) -> str:
    with pytest.raises(InvalidConfig) as error:
        load_config(*arguments)
    return str(error.value)


# --- sources


def test_without_sources_the_defaults_apply() -> None:
    assert load_config() == ServerConfig()


def test_later_sources_take_precedence(tmp_path: Path) -> None:
    path = write(tmp_path, "port: 1\nmax_num_seqs: 2\nspeculation:\n  max_depth: 3\n  enabled: false\n")
    environ = {"PACELINE_PORT": "10", "PACELINE_SPECULATION_MAX_DEPTH": "4", "HOME": "/"}
    config = load_config(path, environ, {"speculation.max_depth": 5})
    assert (config.port, config.engine.max_num_seqs) == (10, 2)
    assert (config.engine.speculation.max_depth, config.engine.speculation.enabled) == (5, False)


@pytest.mark.parametrize("name", ["speculation.max_depth", "speculation_max_depth", "--speculation-max-depth"])
def test_an_override_may_be_a_key_an_identifier_or_an_option(name: str) -> None:
    assert load_config(None, {}, {name: "7"}).engine.speculation.max_depth == 7


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=str)
def test_every_setting_works_in_every_source(setting: Any, tmp_path: Path) -> None:
    others = {
        bool: not setting.default,
        int: {"port": 81, "speculation.min_depth": 2}.get(setting.name, 2048),
        float: 0.5,
        str: setting.choices[-1] if setting.choices else "something",
    }
    value = {
        "speculation.max_depth": 4,
        "max_num_seqs": 3,
        "speculation.depth": "fixed",
        "speculation.method": "suffix",
        "trace_endpoint": "http://127.0.0.1:4318",
    }.get(setting.name, others[setting.kind])
    section, _, key = setting.name.rpartition(".")
    written = str(value).lower() if isinstance(value, bool) else value
    text = f"{section}:\n  {key}: {written}\n" if section else f"{key}: {written}\n"
    extra = {"speculation.depth": "additive"} if setting.name == "speculation.min_depth" else {}
    expected = load_config(None, {}, {**extra, setting.name: value})
    assert expected != load_config(None, {}, extra)
    assert load_config(write(tmp_path, text), {}, extra) == expected
    assert load_config(None, {setting.variable: str(value)}, extra) == expected
    assert load_config(None, {}, {**extra, setting.option: str(value)}) == expected


def test_names_variables_and_options_are_unique() -> None:
    for form in ("name", "variable", "option"):
        assert len({getattr(setting, form) for setting in SETTINGS.values()}) == len(SETTINGS)


def test_every_setting_has_a_description() -> None:
    assert [setting.name for setting in SETTINGS.values() if not setting.help] == []


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("ON", True), ("1", True), ("no", False), ("off", False), ("0", False)]
)
def test_boolean_words(text: str, value: bool) -> None:
    assert load_config(None, {"PACELINE_PREFIX_CACHING": text}).engine.prefix_caching is value


def test_none_resets_a_setting(tmp_path: Path) -> None:
    path = write(tmp_path, "draft: a\nkv_tokens: 4096\n")
    config = load_config(path, {"PACELINE_DRAFT": "none"}, {"kv_tokens": "null"})
    assert (config.engine.draft, config.engine.kv_tokens) == (None, None)


def test_a_section_may_be_empty(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "speculation:\nsampling:\n")) == ServerConfig()
    assert load_config(write(tmp_path, "")) == ServerConfig()


def test_other_variables_are_ignored() -> None:
    environ = {
        "PACELINE_NATIVE": "0",
        "PACELINE_CONFIG": "x.yaml",
        "PACELINE_SERVICE_HOST": "10.0.0.1",
        "PACELINE_SERVICE_PORT_HTTP": "8000",
        "PACELINE_PORT": "tcp://10.0.0.1:8000",
        "PACELINE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "PORT": "9",
    }
    assert load_config(None, environ) == ServerConfig()


# --- errors


def test_unknown_names_suggest_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, "max_num_seq: 4\n")
    assert load_error(path) == f"{path}: unknown key 'max_num_seq'; did you mean 'max_num_seqs'?"
    path = write(tmp_path, "speculation:\n  max_dept: 4\n")
    assert load_error(path) == f"{path}: unknown key 'speculation.max_dept'; did you mean 'speculation.max_depth'?"
    path = write(tmp_path, "speculation: false\n")
    assert (
        load_error(path)
        == f"'speculation' in {path} is a section: write settings below it, such as speculation.enabled"
    )
    path = write(tmp_path, "orchestration:\n  min_length: 4\n")
    assert "did you mean 'orchestration.min_draft_length'?" in load_error(path)
    assert load_error(None, {"PACELINE_MODLE": "x"}).endswith("did you mean 'PACELINE_MODEL'?")
    assert load_error(None, {}, {"hots": "x"}).endswith("did you mean 'host'?")


def test_a_key_that_occurs_twice_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "port: 1\nspeculation:\n  max_depth: 4\n  depth: fixed\n  max_depth: 5\n")
    assert load_error(path) == f"{path}, line 5: the key 'max_depth' occurs twice; remove one of them"
    path = write(tmp_path, "port: 1\nhost: a\nport: 2\n")
    assert load_error(path) == f"{path}, line 3: the key 'port' occurs twice; remove one of them"


def test_all_unknown_names_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "hots: a\nport: 1\nspeculation: {max_dept: 4}\nlearning: {folders: b}\n")
    assert load_error(path, {"PACELINE_MODLE": "x", "PACELINE_TLS_KEYS": "y"}, {"max-wating": "z"}).splitlines() == [
        f"{path}: unknown key 'hots'; did you mean 'host'?",
        f"{path}: unknown key 'speculation.max_dept'; did you mean 'speculation.max_depth'?",
        f"{path}: unknown key 'learning.folders'; did you mean 'learning.folder'?",
        "unknown environment variable 'PACELINE_MODLE'; did you mean 'PACELINE_MODEL'?",
        "unknown environment variable 'PACELINE_TLS_KEYS'; did you mean 'PACELINE_TLS_KEY'?",
        "unknown option 'max-wating'; did you mean 'max_waiting'?",
    ]


def test_a_bad_value_reports_its_source(tmp_path: Path) -> None:
    path = write(tmp_path, "max_num_seqs: four\n")
    assert load_error(path) == (
        f"max_num_seqs must be int or null, got 'four' (max_num_seqs comes from 'max_num_seqs' in {path})"
    )
    assert load_error(None, {"PACELINE_PORT": "http"}) == "port must be a whole number, got 'http' (PACELINE_PORT)"
    assert load_error(None, {"PACELINE_PREFIX_CACHING": "2"}).endswith("(PACELINE_PREFIX_CACHING)")
    assert load_error(None, {}, {"port": 70000}).endswith("got 70000 (port comes from --port)")
    path = write(tmp_path, "num_speculative_tokens: 40\n")
    assert load_error(path).endswith(f"(speculation.max_depth comes from 'num_speculative_tokens' in {path})")
    assert "(sampling.top_p comes from PACELINE_SAMPLING_TOP_P)" in load_error(None, {"PACELINE_SAMPLING_TOP_P": "2"})


def test_conflicting_settings_report_both_sources(tmp_path: Path) -> None:
    path = write(tmp_path, "max_num_seqs: 64\n")
    message = load_error(path, {"PACELINE_MAX_BATCHED_TOKENS": "8"})
    assert f"max_num_seqs comes from 'max_num_seqs' in {path}" in message
    assert "max_batched_tokens comes from PACELINE_MAX_BATCHED_TOKENS" in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_waiting": -1}, "max_waiting must be 0 or more"),
        ({"request_timeout": 0}, "request_timeout must be over 0"),
        ({"drain_timeout": -1}, "drain_timeout must be 0 seconds or more"),
        ({"max_body_bytes": 10}, "max_body_bytes must be at least 1024"),
        ({"log_level": "loud"}, "log_level must be one of debug, info, warning, error"),
        ({"admin_key": "short"}, "admin_key must have at least 8 characters"),
        ({"sampling.temperature": -1}, "sampling.temperature must be between 0"),
        ({"sampling.max_tokens": 0}, "sampling.max_tokens must be at least 1"),
        (
            {"speculation.method": "foo"},
            "speculation.method 'foo' does not exist; choose from: combined, dflash, draft_model, eagle, layer_skip, "
            "lookahead, medusa, ngram, pool, suffix (speculation.method comes from --speculation-method)",
        ),
        ({"speculation.method": "pool"}, "speculation.method 'pool' needs a pool with role draft in a cluster file"),
        (
            {"speculation.method": "eagle", "draft": "none"},
            "speculation.method 'eagle' needs an EAGLE head: set `draft`",
        ),
        ({"speculation.min_depth": 2}, "speculation.min_depth has no effect with speculation.depth 'goodput'"),
        ({"speculation.depth": "additive", "speculation.min_depth": 17}, "between 1 and speculation.max_depth"),
    ],
)
def test_values_out_of_range(values: dict[str, Any], message: str) -> None:
    assert message in load_error(None, {}, values)


def test_an_invalid_file(tmp_path: Path) -> None:
    assert "cannot read" in load_error(tmp_path / "absent.yaml")
    assert "is not YAML" in load_error(write(tmp_path, "model: [1,\n"))
    assert "must be a mapping of settings" in load_error(write(tmp_path, "- model\n"))


@pytest.mark.parametrize(
    "value", ["2024-99-99", "!!bool x", "!!timestamp x", "!!int ''", "0b_", "9" * 5000, "2001-12-14t21:59:43-99:99"]
)
def test_a_value_that_yaml_cannot_make_is_an_error(value: str, tmp_path: Path) -> None:
    assert "is not YAML" in load_error(write(tmp_path, f"port: {value}"))


def test_the_admin_key_is_not_printed() -> None:
    assert "very-secret" not in repr(load_config(None, {"PACELINE_ADMIN_KEY": "very-secret"}))


# --- names of other servers


def test_the_published_template_loads(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, TEMPLATE))
    assert config.engine == EngineConfig(
        model="meta-llama/Llama-3-70B-Instruct",
        draft="meta-llama/Llama-3-8B-Instruct",
        dtype="float16",
        tensor_parallel_size=2,
        memory_fraction=0.85,
        prefix_caching=True,
        speculation=SpeculationConfig(
            depth="additive", min_depth=2, max_depth=16, acceptance_threshold=0.65, breaker_rounds=3
        ),
    )
    assert config.sampling == SamplingDefaults(temperature=0.7, top_p=0.9, top_k=50)
    make_breaker(config.engine.speculation)
    depth = make_depth(config.engine.speculation, config.engine.speculation.max_depth or 0)
    assert depth.decide([DepthCandidate(0, "chat", 99)]) == [6]


@pytest.mark.parametrize(
    ("rule", "bounds", "start"), [("threshold", (1, 4), 4), ("threshold", (7, 9), 7), ("additive", (8, 16), 8)]
)
def test_depth_bounds_reach_the_rules(rule: str, bounds: tuple[int, int], start: int) -> None:
    minimum, maximum = bounds
    config = load_config(
        None, {}, {"speculation.depth": rule, "speculation.min_depth": minimum, "speculation.max_depth": maximum}
    )
    assert make_depth(config.engine.speculation, maximum).decide([DepthCandidate(0, "chat", 99)]) == [start]


def test_adaptive_draft_false_is_the_fixed_rule(tmp_path: Path) -> None:
    path = write(tmp_path, "num_speculative_tokens: 5\norchestration:\n  adaptive_draft: false\n")
    speculation = load_config(path).engine.speculation
    assert (speculation.depth, speculation.max_depth) == ("fixed", 5)
    assert "must be true or false" in load_error(write(tmp_path, "orchestration:\n  adaptive_draft: often\n"))


def test_two_names_of_one_setting_are_rejected(tmp_path: Path) -> None:
    path = write(tmp_path, "draft: a\nspeculative_model: b\n")
    assert load_error(path) == f"'draft' in {path} and 'speculative_model' in {path} are the same setting: remove one"
    path = write(tmp_path, "num_speculative_tokens: 3\nspeculation:\n  max_depth: 4\n")
    assert "are the same setting" in load_error(path)


# --- learning


def test_learning_is_a_switch_or_a_section(tmp_path: Path) -> None:
    assert not load_config().learning.is_collecting
    assert load_config(write(tmp_path, "learning: true\n")).learning.enabled
    assert load_config(write(tmp_path, "gateway:\n  learning: true\n"), section="gateway").learning.enabled
    section = load_config(write(tmp_path, "learning:\n  enabled: true\n  max_samples: 7\n")).learning
    assert (section.is_collecting, section.max_samples) == (True, 7)
    section = load_config(write(tmp_path, "learning:\n  folder: versions\n  draft: smollm2-eagle\n")).learning
    assert (section.is_collecting, section.draft) == (True, "smollm2-eagle")
    assert load_config(environ={"PACELINE_LEARNING_ENABLED": "true"}).learning.enabled
    assert "learning.enabled" in load_error(write(tmp_path, "learning: 5\n"))
    assert "learning.max_samples" in load_error(write(tmp_path, "learning:\n  max_samples: 0\n"))
    assert "learning.share" in load_error(write(tmp_path, "learning:\n  share: 2\n"))


# --- documentation


def test_the_documentation_is_current() -> None:
    page = runpy.run_path(str(DOCS / "setting_tables.py"))["page"]
    text = (DOCS / "configuration.md").read_text("utf-8")
    assert page(text) == text, "run: python docs/setting_tables.py"
    assert "| `speculation.max_depth` | " in text
    for section, setting in SWITCHES.items():
        assert f"`{section}: true` is short for `{setting}`" in text


# --- clusters

CLUSTER = {
    "pools": [
        {"name": "draft", "role": "draft", "model": "small"},
        {"name": "target", "role": "target", "model": "big", "limits": {"max_num_seqs": 7}},
    ],
    "gateway": {"port": 9000, "sampling": {"temperature": 0.5}},
}


def write_cluster(folder: Path, document: Any) -> Path:
    path = folder / "file.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_file_without_pools_configures_a_server(tmp_path: Path) -> None:
    config = load_gateway_config(write_cluster(tmp_path, {"model": "big", "port": 9000}), {}, {})
    assert isinstance(config, ServerConfig)
    assert (config.engine.model, config.port) == ("big", 9000)
    assert isinstance(load_gateway_config(None, {}, {}), ServerConfig)


def test_a_file_with_pools_configures_a_cluster(tmp_path: Path) -> None:
    config = load_gateway_config(write_cluster(tmp_path, CLUSTER), {"PACELINE_MAX_WAITING": "3"}, {"port": "9001"})
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
def test_engine_settings_belong_to_pools(
    tmp_path: Path, gateway: dict[str, Any], environ: dict[str, str], options: dict[str, str]
) -> None:
    with pytest.raises(InvalidConfig, match="remove those settings"):
        load_gateway_config(write_cluster(tmp_path, CLUSTER | {"gateway": gateway}), environ, options)


def test_gateway_uses_the_trace_endpoint_of_the_cluster(tmp_path: Path) -> None:
    url = "http://127.0.0.1:4318"
    config = load_gateway_config(write_cluster(tmp_path, CLUSTER | {"trace_endpoint": url}), {}, {})
    assert isinstance(config, GatewayConfig)
    assert (config.cluster.trace_endpoint, config.server.trace_endpoint) == (url, url)
    own = load_gateway_config(
        write_cluster(tmp_path, CLUSTER | {"trace_endpoint": url}), {}, {"trace_endpoint": "http://other:1"}
    )
    assert isinstance(own, GatewayConfig)
    assert own.server.trace_endpoint == "http://other:1"
    with pytest.raises(InvalidConfig, match="trace_endpoint must be a URL"):
        load_gateway_config(write_cluster(tmp_path, CLUSTER | {"trace_endpoint": "collector"}), {}, {})


def test_errors_report_their_position(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"did you mean 'gateway\.port'"):
        load_gateway_config(write_cluster(tmp_path, CLUSTER | {"gateway": {"prt": 1}}), {}, {})
    with pytest.raises(InvalidConfig, match=r"file.yaml: unknown key 'hots'"):
        load_gateway_config(write_cluster(tmp_path, CLUSTER | {"hots": 1}), {}, {})
    with pytest.raises(InvalidConfig, match="mapping"):
        load_gateway_config(write_cluster(tmp_path, ["pools"]), {}, {})


def test_folders_are_relative_to_the_file(tmp_path: Path) -> None:
    config = load_gateway_config(write_cluster(tmp_path, CLUSTER | {"keys": "keys", "state_dir": "/var/state"}), {}, {})
    assert isinstance(config, GatewayConfig)
    assert (config.cluster.keys, config.cluster.state_dir) == (str(tmp_path / "keys"), "/var/state")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (BOMB, "use fewer aliases"),
        ("model: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("model: &a [*a]\n", "contains itself"),
        ("# " + "x" * 1_100_000, "at most 1048576"),
    ],
    ids=["aliases", "levels", "itself", "size"],
)
def test_a_bomb_of_yaml_is_an_error(text: str, error: str, tmp_path: Path) -> None:
    assert error in load_error(write(tmp_path, text))
    with pytest.raises(InvalidConfig, match=error):
        load_cluster(write(tmp_path, text))


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (("/a/one.gguf", "owner/two"), [("one", "/a/one.gguf"), ("two", "owner/two")]),
        (("/a/one", "/b/one"), [("/a/one",), ("/b/one",)]),
    ],
)
def test_models_of_a_cluster_have_short_names_unless_two_share_one(
    models: tuple[str, str], names: list[tuple[str, ...]], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    pools = [f"{{name: pool-{i}, role: target, model: {model}, devices: [cpu]}}" for i, model in enumerate(models)]
    file.write_text(f"pools: [{', '.join(pools)}]\n")
    config = load_gateway_config(file, {}, {})
    assert [server.model_names for server, _ in config.models()] == names


def test_several_served_names() -> None:
    config = load_config(overrides={"served_model_name": "first, second"})
    assert config.model_names == ("first", "second")
    assert config.model_name == "first"
