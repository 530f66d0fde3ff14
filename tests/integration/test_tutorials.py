"""Run the tutorials and guides block by block; each prints what its page shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pages import Page, blocks_of, page_runner

PAGES = (
    "docs/tutorials/python.md",
    "docs/how-to/poison-messages.md",
    "docs/how-to/rescale.md",
    "docs/tutorials/spark.md",
    "docs/how-to/backfill-then-stream.md",
    "docs/tutorials/ray.md",
)
"""Each page has topics of its own. They share a broker."""

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.ray, pytest.mark.timeout(1_800)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with page_runner(tmp_path_factory.mktemp("tutorials")) as made:
        made.run("$ keyshard broker start")  # the pages find it running
        yield made


@pytest.mark.parametrize("name", PAGES)
def test_a_page_prints_the_output_that_it_shows(name: str, page: Page) -> None:
    for block in blocks_of(name):
        page.show(block)
