"""Laws of the choice of runner: local runs are pinned, unsafe ones refused, slots declared."""

from __future__ import annotations

import os

import pytest
from apache_beam.options.pipeline_options import StandardOptions

from batchgen_beam.errors import OptionError
from batchgen_beam.pipelines.options import parse_options
from batchgen_beam.pipelines.runners import LOCAL, check_runner_options, pin_runner


@pytest.mark.parametrize("flags", [[], ["--runner=DirectRunner"], ["--runner=SwitchingDirectRunner"],
                                   ["--runner=directrunner"], ["--runner=direct"]])
def test_direct_means_the_pinned_runner(flags: list[str]) -> None:
    """Named or by default, with one line to say so."""
    options = parse_options(flags)
    facts = pin_runner(options)
    assert (facts.name, facts.slots, facts.processes, facts.in_launcher) == (LOCAL, 1, 1, True)
    assert facts.note is not None
    assert LOCAL in facts.note
    assert ("DirectRunner" in facts.note) is bool(flags), "only where the user named it"
    assert options.view_as(StandardOptions).runner == LOCAL


def test_the_pinned_runner_by_name_needs_no_note() -> None:
    """Who asks for what runs is told nothing."""
    assert pin_runner(parse_options(["--runner=FnApiRunner"])).note is None


@pytest.mark.parametrize("runner", ["BundleBasedDirectRunner", "TestDirectRunner", "InteractiveRunner",
                                    "apache_beam.runners.direct.direct_runner.BundleBasedDirectRunner"])
def test_runners_that_lose_rows_are_refused(runner: str) -> None:
    """By name, with the one to use."""
    with pytest.raises(OptionError, match=rf"--runner={runner.rpartition('.')[2]}.*use --runner={LOCAL}"):
        pin_runner(parse_options([f"--runner={runner}"]))


@pytest.mark.parametrize(("flags", "slots", "processes", "in_launcher"), [
    (["--direct_num_workers=3", "--direct_running_mode=multi_threading"], 3, 1, True),
    (["--direct_num_workers=3", "--direct_running_mode=multi_processing"], 3, 3, False),
    (["--runner=FlinkRunner", "--parallelism=6"], 6, 1, False),
    (["--runner=PortableRunner", "--parallelism=4", "--sdk_worker_parallelism=1"], 4, 1, False),
    (["--runner=DataflowRunner", "--max_num_workers=9"], 9, 1, False),
    (["--runner=PrismRunner"], 1, 1, False),
    (["--direct_num_workers=0", "--direct_running_mode=multi_processing"], os.cpu_count(), os.cpu_count(), False),
])
def test_slots_are_what_the_runner_declares(flags: list[str], slots: int, processes: int, in_launcher: bool) -> None:
    """Lanes and memory are shared by these numbers."""
    facts = pin_runner(parse_options(flags))
    assert (facts.slots, facts.processes, facts.in_launcher) == (slots, processes, in_launcher)


@pytest.mark.parametrize("runner", ["NoSuchRunner", "no.such.Runner", "batchgen_beam.errors.NoSuchRunner"])
def test_an_unknown_runner_is_refused_with_the_known_ones(runner: str) -> None:
    """Before anything is opened."""
    with pytest.raises(OptionError, match=rf"--runner={runner} is no runner; use one of .*FlinkRunner, {LOCAL}"):
        pin_runner(parse_options([f"--runner={runner}"]))


@pytest.mark.parametrize(("flags", "here"), [
    ([], True),
    (["--direct_num_workers=2", "--direct_running_mode=multi_processing"], True),
    (["--runner=PrismRunner"], True),
    (["--runner=FlinkRunner"], True),
    (["--runner=FlinkRunner", "--flink_master=cluster:8081"], False),
    (["--runner=FlinkRunner", "--environment_type=DOCKER"], False),
    (["--runner=PortableRunner"], False),
    (["--runner=PortableRunner", "--environment_type=LOOPBACK"], True),
    (["--runner=DataflowRunner"], False),
])
def test_whether_workers_see_the_launchers_files(flags: list[str], here: bool) -> None:
    """As Beam places workers, or as the user places them."""
    assert pin_runner(parse_options(flags)).on_launcher_machine is here


def test_incomplete_runner_options_are_refused_in_one_line() -> None:
    """Beam's own words, all of them in one message; what is complete passes."""
    options = parse_options(["--runner=DataflowRunner"])
    pin_runner(options)
    with pytest.raises(OptionError, match=r"^--runner=DataflowRunner: .*project.*region.*$"):
        check_runner_options(options)
    complete = parse_options([])
    pin_runner(complete)
    check_runner_options(complete)


def test_a_negative_number_of_workers_is_refused() -> None:
    """By the flag's name."""
    with pytest.raises(OptionError, match=r"--direct_num_workers must be at least 0, got -3"):
        pin_runner(parse_options(["--direct_num_workers=-3"]))


def test_an_sdk_worker_parallelism_that_is_no_number_is_refused() -> None:
    """By the flag's name; Beam takes any word."""
    with pytest.raises(OptionError, match=r"--sdk_worker_parallelism must be a number, got 'two'"):
        pin_runner(parse_options(["--runner=PortableRunner", "--sdk_worker_parallelism=two"]))
