"""`tangram serve --page` and `--no-page`."""

from __future__ import annotations

import pytest

from tangram.cli.serve_options import choose_visibility
from tangram.errors import ConfigError
from tangram.serve.options import Visibility


@pytest.mark.parametrize("page", Visibility)
def test_the_page_is_for_whom_the_option_says(page: Visibility) -> None:
    assert choose_visibility(page, no_page=False) is page


def test_no_page_is_off() -> None:
    assert choose_visibility(Visibility.auto, no_page=True) is Visibility.off
    assert choose_visibility(Visibility.off, no_page=True) is Visibility.off


@pytest.mark.parametrize("page", [Visibility.open, Visibility.local])
def test_options_that_contradict_each_other_are_refused(page: Visibility) -> None:
    with pytest.raises(ConfigError, match=f"page is '{page.value}'.*no_page"):
        choose_visibility(page, no_page=True)
