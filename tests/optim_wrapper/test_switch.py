from __future__ import annotations

import pytest

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.launch.config import Switch, parse_switch, switch_from_env
from tests import golden


@pytest.mark.parametrize(
    "text", [None, "", "  ", "{}", "{TTP:1}", "{UCE:0}", " {TTP : 1} ", '{"TTP":"1"}', "'{TTP:1}'"]
)
def test_on_is_the_default_and_one_means_on(text: str | None) -> None:
    assert parse_switch(text) == Switch(True)


@pytest.mark.parametrize("text", ["{TTP:0}", "{'TTP':0}", '"{TTP:0}"', "{TTP:0,}", "{UCE:0,TTP:0}"])
def test_zero_means_off(text: str) -> None:
    assert parse_switch(text) == Switch(False)


def test_other_upstream_keys_are_accepted_and_named_as_ignored() -> None:
    assert parse_switch("{TTP:1,UCE:1,ARF:1,TSP:1,HCCE:1,RSC:0}") == Switch(True, ("UCE", "ARF", "TSP", "HCCE"))
    assert parse_switch("{TTP:0,ARF:1}") == Switch(False, ("ARF",))


@pytest.mark.parametrize(
    "text",
    ["TTP:1", "1", "{TTP}", "{TTP:2}", "{TTP:yes}", "{TTP:1", "{TPP:1}", "{TTP:1 UCE:1}", "{TTP:1,TTP:0}", "{,TTP:1}",
     "{TTP:1,,UCE:1}", "{'TTP:1}", "[TTP:1]", "{ttp:1}"],
)  # fmt: skip
def test_a_malformed_value_is_shown_together_with_the_right_form(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_switch(text)
    assert repr(text) in str(caught.value)
    assert "{TTP:1}" in str(caught.value)


def test_the_environment_is_read_and_ignored_keys_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert switch_from_env({}) == Switch(True)
    assert switch_from_env({"MS_ENABLE_TFT": "{TTP:1,UCE:1}"}).ignored == ("UCE",)
    golden.says(caplog.messages)
