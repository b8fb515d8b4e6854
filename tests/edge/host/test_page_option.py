"""`tangram serve --page` and `--no-page`."""

from __future__ import annotations

import pytest

from tangram.cli.serve_options import PageFor, choose_page
from tangram.errors import ConfigError
from tangram.web.access import Visibility


@pytest.mark.parametrize("page", PageFor)
def test_the_page_is_for_whom_the_option_says(page: PageFor) -> None:
    assert choose_page(page, no_page=False) is page


def test_no_page_is_off() -> None:
    assert choose_page(PageFor.auto, no_page=True) is PageFor.off
    assert choose_page(PageFor.off, no_page=True) is PageFor.off


@pytest.mark.parametrize("page", [PageFor.open, PageFor.local])
def test_options_that_contradict_each_other_are_refused(page: PageFor) -> None:
    with pytest.raises(ConfigError, match=f"page is '{page.value}'.*no_page"):
        choose_page(page, no_page=True)


def test_what_is_not_off_is_known_to_the_page() -> None:
    assert {page.value for page in PageFor} - {"off"} == {one.value for one in Visibility}
