"""Prices: dollars an hour and watts of machines, from the catalogue and a user's file."""

from pathlib import Path

import pytest

from gdp.cluster import Cluster
from gdp.cluster.prices import Price, Prices
from gdp.errors import InputError


def test_a_machine_costs_what_its_devices_do() -> None:
    """Four L4 of 72 W and 0.805 $ an hour; their CPU of 150 W is in the price of the host."""
    price = Prices().of(Cluster.parse("4xl4-24g+cpu-16core"))
    assert price.watts == 4 * 72 + 150
    assert price.dollars_per_hour == pytest.approx(3.22)
    assert price.per_dollar(10.0) == pytest.approx(36_000 / 3.22)
    assert price.per_joule(438.0) == 1.0


def test_figures_that_are_not_known_are_not_made_up() -> None:
    """A card without a price, and a kind that is not built in, leave the sum open."""
    assert Prices().of(Cluster.parse("l4-24g+rtx4090-24g")) == Price(None, 522)
    assert Price(None, None).per_dollar(1.0) is None


def test_a_file_of_the_users_goes_before_the_catalogue(tmp_path: Path) -> None:
    """Each figure of each kind on its own."""
    (tmp_path / "mine.yaml").write_text("rtx4090-24g: {dollars_per_hour: 0.4}\nl4-24g: {watts: 60}\n")
    prices = Prices.load(tmp_path / "mine.yaml")
    assert prices.of(Cluster.parse("rtx4090-24g")) == Price(0.4, 450)
    assert prices.of(Cluster.parse("2xl4-24g")).watts == 120


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "no kinds of devices"),
        ("4090: {watts: 450}", "4090: is no name of a kind of device"),
        ("l4-24g: 3", "l4-24g: is 3; dollars_per_hour and watts are expected"),
        ("l4-24g: {watts: -1}", "watts is -1; a number above 0"),
        ("l4-24g: {watts: .nan}", "watts is nan; a number above 0"),
        ("l4-24g: {euros: 1}", "dollars_per_hour and watts"),
    ],
)
def test_nonsense_in_a_file(tmp_path: Path, text: str, message: str) -> None:
    """One line that names the file, the kind and the remedy."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=f"mine.yaml.*{message}"):
        Prices.load(path)


def test_a_kind_that_no_device_has_is_told(tmp_path: Path) -> None:
    """A misspelt kind would change no row of a sweep: near names are told. Kinds of one's own cluster are fine."""
    (tmp_path / "prices.yaml").write_text("rtx509-32g: {watts: 300}\nl4-24g: {watts: 70}\n")
    (sentence,) = Prices.load(tmp_path / "prices.yaml").unknown([Cluster.parse("l4-24g")])
    assert sentence.startswith("rtx509-32g: no such kind of device; did you mean rtx5090-32g")
