"""The page of settings in docs/ is what the schema says."""

from pathlib import Path

from ssdtune.config.leaves import all_leaves
from ssdtune.config.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == reference(), (
        "run: python -m ssdtune.config.reference > docs/configuration.md"
    )


def test_every_setting_has_a_help_text_and_is_on_the_page():
    page = reference()
    for leaf in all_leaves().values():
        assert len(leaf.meta["help"]) > 3, leaf.key
        assert f"| `{leaf.name}` | `{leaf.flag}" in page
