"""Settings and versions of the plugin."""

import pytest

from paceline.core.errors import InvalidConfig, UnsupportedVersion
from paceline.vllm.settings import ACCEPTED, Settings, check_version


def test_settings_are_read_from_additional_config():
    assert Settings.read({}) == Settings.read(None) == Settings()
    given = {"paceline": {"method": "suffix", "depth": "fixed", "workers": ["tcp://a:1"]}}
    assert Settings.read(given) == Settings("suffix", "fixed", ("tcp://a:1",))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metod": "suffix"}, "did you mean 'method'"),
        ({"method": "eagle"}, "one of suffix, ngram, combined"),
        ({"depth": 3}, "one of goodput, fixed"),
        ({"workers": "tcp://a:1"}, "a list of addresses"),
        ("suffix", "must be an object"),
    ],
)
def test_wrong_settings_are_refused(given, message):
    with pytest.raises(InvalidConfig, match=message):
        Settings.read({"paceline": given})


def test_other_versions_are_refused():
    for release in ACCEPTED:
        assert check_version(f"{release}.0") == f"{release}.0"
    for other in ("0.25.1", "0.99.0", "1.0", "unknown"):
        with pytest.raises(UnsupportedVersion, match="make test-vllm"):
            check_version(other)
