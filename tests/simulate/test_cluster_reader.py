"""Clusters from TOML: how they are read, and the errors for those that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.observe.driver import Fault
from paceline.simulate import ClusterError, Jitter, builtin_names, limit_seconds, load_cluster, parse_cluster, units
from paceline.simulate.cluster_reader import describe

#: A description with most of the keys.
SAMPLE = """
[model]
bytes = 552e6
[servers]
count = 4
link = "10Gbit"            # each direction
latency = "50us"
[[workers]]
count = 16
link = "10Gbit"
batch = 128
samples_per_second = 183.0
overhead = "0s"
jitter = { kind = "lognormal", sigma = 0.1 }   # optional
"""


def sample(old: str = "", new: str = "") -> str:
    assert old in SAMPLE
    return SAMPLE.replace(old, new, 1)


def complaint(text: str) -> str:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text, "mine", "mine.toml")
    message = str(caught.value)
    assert message.startswith("mine.toml: ")
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_the_sample_is_read() -> None:
    spec = parse_cluster(SAMPLE, "mine", "mine.toml")
    assert (spec.name, spec.model_bytes, spec.servers) == ("mine", 552e6, 4)
    assert spec.latency == pytest.approx(50e-6)
    assert spec.server_link == 1.25e9
    assert len(spec.workers) == 16
    assert set(spec.workers) == {spec.workers[0]}
    worker = spec.workers[0]
    assert (worker.link, worker.batch, worker.samples_per_second, worker.overhead) == (1.25e9, 128, 183.0, 0.0)
    assert worker.jitter == Jitter("lognormal", 0.1)
    assert worker.compute_seconds() == pytest.approx(128 / 183)
    assert not spec.colocate
    assert spec.faults == ()


def test_optional_keys_have_defaults() -> None:
    spec = parse_cluster(
        '[model]\nbytes = 1\n[servers]\ncount = 1\nlink = "1Gbit"\n'
        '[[workers]]\nlink = "1Gbit"\nbatch = 1\nsamples_per_second = 1',
        "small",
        "small.toml",
    )
    assert len(spec.workers) == 1
    assert spec.workers[0].jitter == Jitter()
    assert (spec.latency, spec.lease, spec.slices, spec.apply_rate) == (0.0, 30.0, 16, 10e9)


def test_tables_of_workers_follow_each_other() -> None:
    more = SAMPLE + '[[workers]]\nlink = "1Gbit"\nbatch = 8\nsamples_per_second = 10\noverhead = "20ms"\n'
    spec = parse_cluster(more, "mine", "mine.toml")
    assert [worker.batch for worker in spec.workers] == [128] * 16 + [8]
    assert spec.workers[16].compute_seconds() == pytest.approx(0.82)
    assert spec.workers[16].compute_seconds(batch=18) == pytest.approx(1.82)


def test_the_apply_rate_and_the_lease_are_read() -> None:
    text = sample('latency = "50us"', 'apply = "2GB/s"\nlease = "3s"')
    spec = parse_cluster(text, "mine", "mine.toml")
    assert (spec.apply_rate, spec.lease) == (2e9, 3.0)
    assert spec.apply_seconds == pytest.approx(552e6 / 4 / 2e9)


def test_every_kind_of_jitter_is_read() -> None:
    old = '{ kind = "lognormal", sigma = 0.1 }'
    for new, jitter in (
        ('{ kind = "none" }', Jitter()),
        ('{ kind = "normal", sigma = 0.2 }', Jitter("normal", 0.2)),
        (
            '{ kind = "straggle", probability = 0.3, mean = "7s", deviation = "500ms" }',
            Jitter("straggle", probability=0.3, mean=7.0, deviation=0.5),
        ),
        ('{ kind = "straggle", probability = 1, mean = 2 }', Jitter("straggle", probability=1.0, mean=2.0)),
        ('{ kind = "delay", mu = -2.0, sigma = 1.0 }', Jitter("delay", sigma=1.0, mu=-2.0)),
    ):
        assert parse_cluster(sample(old, new), "mine", "mine.toml").workers[0].jitter == jitter


def test_local_steps_updates_and_overlap_are_read() -> None:
    spec = parse_cluster(f'local_steps = 50\nupdates = "topk:2e-2"\noverlap = true\n{SAMPLE}', "mine", "mine.toml")
    assert (spec.local_steps, spec.updates, spec.overlap) == (50, "topk:0.02", True)
    assert not spec.exchanges_gradients
    plain = parse_cluster(SAMPLE, "mine", "mine.toml")
    assert (plain.local_steps, plain.updates, plain.overlap) == (1, "", False)
    assert parse_cluster(f"local_steps = 1\noverlap = false\n{SAMPLE}", "mine", "mine.toml") == plain


def test_faults_are_read() -> None:
    text = SAMPLE + (
        '[[faults]]\nkind = "kill"\ntime = "5s"\nworker = 3\n'
        '[[faults]]\nkind = "rejoin"\ntime = "1min"\nworker = 3\n'
        '[[faults]]\nkind = "pause"\ntime = 7\nworker = 15\nseconds = "2s"\n'
        '[[faults]]\nkind = "cut"\ntime = 0\nworker = 0\nseconds = 100\n'
    )
    assert parse_cluster(text, "mine", "mine.toml").faults == (
        Fault(5.0, 3, "kill"),
        Fault(60.0, 3, "rejoin"),
        Fault(7.0, 15, "pause", 2.0),
        Fault(0.0, 0, "cut", 100.0),
    )


RATE = 'a rate greater than 0, such as "10Gbit" or "488MB/s"'
SIZE = 'a size greater than 0, such as 552e6 or "552MB"'
TIME = 'a time of at least 0, such as "50us" or "0.2s"'
WHOLE = "a whole number of at least 1"
STEPS = "a whole number from 1 to 1000000"
CODEC = "int8, int4, topk:F such as topk:0.02, or a part at a time such as int4/4"


@pytest.mark.parametrize(
    ("old", "new", "key", "expected"),
    [
        # unknown keys
        ("bytes = 552e6", "bytes = 552e6\nbites = 1", "model.bites", "did you mean 'bytes'?"),
        ("count = 4", "count = 4\ncolour = 1", "servers.colour", "expected one of count, link, link_in, latency,"),
        ('overhead = "0s"', 'overhaed = "0s"', "workers[0].overhaed", "did you mean 'overhead'?"),
        ("[model]", "[modle]\n[model]", "modle", "did you mean 'model'?"),
        ("sigma = 0.1", "sigma = 0.1, mu = 1", "workers[0].jitter.mu", "expected one of kind, sigma"),
        ('kind = "lognormal", sigma = 0.1', 'kind = "none", sigma = 0.1', "workers[0].jitter.sigma", "is not known"),
        # missing keys
        ("bytes = 552e6", "", "model.bytes", f"is missing; expected {SIZE}"),
        ("count = 4", "", "servers.count", f"is missing; expected {WHOLE}"),
        ('link = "10Gbit"            #', "#", "servers.link", f"is missing; expected {RATE}"),
        ("batch = 128", "", "workers[0].batch", f"is missing; expected {WHOLE}"),
        ("samples_per_second = 183.0", "", "workers[0].samples_per_second", "expected a number greater than 0"),
        (", sigma = 0.1", "", "workers[0].jitter.sigma", "is missing; expected a number from 0 to 3"),
        (
            'kind = "lognormal", ',
            "",
            "workers[0].jitter.kind",
            "expected one of none, normal, lognormal, straggle, delay",
        ),
        # bad units
        ('"10Gbit"', '"10Gb"', "servers.link", f"is '10Gb'; expected {RATE}"),
        ('"10Gbit"', '"ten Gbit"', "servers.link", RATE),
        ('"50us"', '"50"', "servers.latency", TIME),
        ('"50us"', '"50 parsecs"', "servers.latency", TIME),
        ("552e6", '"552"', "model.bytes", SIZE),
        ("552e6", '"552Mbit"', "model.bytes", SIZE),
        # values out of range
        ("552e6", "-1", "model.bytes", f"is -1; expected {SIZE}"),
        ("552e6", "0", "model.bytes", SIZE),
        ("552e6", '"-5MB"', "model.bytes", SIZE),
        ("552e6", "inf", "model.bytes", SIZE),
        ("552e6", "nan", "model.bytes", SIZE),
        ("552e6", "1" + "0" * 400, "model.bytes", SIZE),
        ("552e6", '"1e999MB"', "model.bytes", SIZE),
        ("count = 4", "count = 0", "servers.count", f"is 0; expected {WHOLE}"),
        ("count = 4", "count = -4", "servers.count", WHOLE),
        ("count = 16", "count = 0", "workers[0].count", WHOLE),
        ('"10Gbit"', '"-10Gbit"', "servers.link", RATE),
        ('"10Gbit"', "0", "servers.link", RATE),
        ('"50us"', '"-50us"', "servers.latency", TIME),
        ("batch = 128", "batch = 0", "workers[0].batch", WHOLE),
        ("183.0", "0.0", "workers[0].samples_per_second", "a number greater than 0"),
        ("183.0", "-1.0", "workers[0].samples_per_second", "a number greater than 0"),
        ("sigma = 0.1", "sigma = -0.1", "workers[0].jitter.sigma", "a number from 0 to 3"),
        ("sigma = 0.1", "sigma = 1e200", "workers[0].jitter.sigma", "a number from 0 to 3"),
        # wrong types
        ("count = 4", "count = 4.0", "servers.count", f"is 4.0; expected {WHOLE}"),
        ("count = 4", "count = true", "servers.count", WHOLE),
        ("count = 4", 'count = "4"', "servers.count", WHOLE),
        ("552e6", "true", "model.bytes", SIZE),
        ("552e6", "[1]", "model.bytes", SIZE),
        ("183.0", '"183"', "workers[0].samples_per_second", "a number greater than 0"),
        ('{ kind = "lognormal", sigma = 0.1 }', "0.1", "workers[0].jitter", "is 0.1; expected a table"),
        ('"lognormal"', '"uniform"', "workers[0].jitter.kind", "is 'uniform'; expected one of"),
        ('"lognormal"', "3", "workers[0].jitter.kind", "is 3; expected one of"),
        ('"lognormal"', "[1]", "workers[0].jitter.kind", "expected one of"),
        (
            'kind = "lognormal", sigma = 0.1',
            'kind = "straggle", probability = 1.5, mean = 1',
            "workers[0].jitter.probability",
            "is 1.5; expected a number from 0 to 1",
        ),
        (
            'kind = "lognormal", sigma = 0.1',
            'kind = "straggle", probability = 0.5',
            "workers[0].jitter.mean",
            f"is missing; expected {TIME}",
        ),
        (
            'kind = "lognormal", sigma = 0.1',
            'kind = "delay", sigma = 0.1, mu = 11',
            "workers[0].jitter.mu",
            "is 11; expected a number from −10 to 10",
        ),
        # local steps, small updates and overlap
        ("[model]", "local_steps = 0\n[model]", "local_steps", f"is 0; expected {STEPS}"),
        ("[model]", "local_steps = 1000001\n[model]", "local_steps", STEPS),
        ("[model]", "local_steps = 50.0\n[model]", "local_steps", f"is 50.0; expected {STEPS}"),
        ("[model]", "local_steps = true\n[model]", "local_steps", STEPS),
        ("[model]", "local_step = 50\n[model]", "local_step", "did you mean 'local_steps'?"),
        ("[servers]", "local_steps = 50\n[servers]", "model.local_steps", "is not known"),
        ("[model]", 'updates = "int5"\n[model]', "updates", f"is 'int5'; expected {CODEC}"),
        ("[model]", 'updates = "topk"\n[model]', "updates", CODEC),
        ("[model]", 'updates = "topk:2"\n[model]', "updates", CODEC),
        ("[model]", 'updates = "float32"\n[model]', "updates", CODEC),
        ("[model]", 'updates = ""\n[model]', "updates", CODEC),
        ("[model]", "updates = 8\n[model]", "updates", f"is 8; expected {CODEC}"),
        ("[model]", 'overlap = "yes"\n[model]', "overlap", "is 'yes'; expected true or false"),
        ("[model]", "overlap = 1\n[model]", "overlap", "is 1; expected true or false"),
        # tables
        ("[model]\nbytes = 552e6", "", "model", "is missing; expected a table"),
        ("[model]\nbytes = 552e6", "model = 5", "model", "is 5; expected a table"),
        ("[[workers]]", "[workers]", "workers", "expected one or more tables, each headed [[workers]]"),
    ],
)
def test_an_error_names_the_key_and_what_was_expected(old: str, new: str, key: str, expected: str) -> None:
    message = complaint(sample(old, new))
    assert message.startswith(f"mine.toml: {key} ")
    assert expected in message


@pytest.mark.parametrize("workers", ["", "workers = []\n", "workers = [1]\n"])
def test_there_must_be_workers(workers: str) -> None:
    head = SAMPLE.partition("[[workers]]")[0]
    message = complaint(workers + head)
    assert message.startswith("mine.toml: workers ")
    assert "expected one or more tables, each headed [[workers]]" in message


@pytest.mark.parametrize(
    ("fault", "key", "expected"),
    [
        (
            'kind = "burn"\ntime = 1\nworker = 0',
            "faults[0].kind",
            "is 'burn'; expected one of kill, pause, cut, rejoin",
        ),
        ('kind = "kill"\nworker = 0', "faults[0].time", f"is missing; expected {TIME}"),
        ('kind = "kill"\ntime = -1\nworker = 0', "faults[0].time", TIME),
        ('kind = "kill"\ntime = 1', "faults[0].worker", "is missing; expected a worker's number, from 0 to 15"),
        ('kind = "kill"\ntime = 1\nworker = 16', "faults[0].worker", "is 16; expected a worker's number, from 0 to 15"),
        ('kind = "kill"\ntime = 1\nworker = true', "faults[0].worker", "from 0 to 15"),
        ('kind = "pause"\ntime = 1\nworker = 0', "faults[0].seconds", f"is missing; expected {TIME}"),
        ('kind = "kill"\ntime = 1\nworker = 0\nseconds = 1', "faults[0].seconds", "is not known"),
    ],
)
def test_an_error_in_a_fault_names_its_key(fault: str, key: str, expected: str) -> None:
    message = complaint(f"{SAMPLE}[[faults]]\n{fault}\n")
    assert message.startswith(f"mine.toml: {key} ")
    assert expected in message


def test_an_error_names_the_table_of_workers_by_its_index() -> None:
    assert complaint(SAMPLE + "[[workers]]\nbatch = 1\n").startswith("mine.toml: workers[1].link is missing")


@pytest.mark.parametrize("text", ["[model", "bytes = = 3", "[model]\n[model]\n", "\x00"])
def test_a_text_that_is_not_toml_is_refused(text: str) -> None:
    assert "is not valid TOML" in complaint(text)


# Files


def test_a_cluster_is_loaded_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "our lab.toml"
    path.write_text(SAMPLE + "# Größe\n", encoding="utf-8")
    assert load_cluster(str(path)).name == "our lab"


def test_errors_name_the_path_as_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(sample("552e6", "-1"))
    with pytest.raises(ClusterError) as caught:
        load_cluster(str(path))
    assert str(caught.value).startswith(f"{path}: model.bytes is -1")


def test_an_unknown_cluster_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ClusterError) as caught:
        load_cluster("r2sp-a-vgg61")
    message = str(caught.value)
    assert "There is no cluster 'r2sp-a-vgg61'" in message
    assert "Did you mean 'r2sp-a-vgg16'?" in message
    for name in builtin_names():
        assert name in message


@pytest.mark.parametrize("what", ["/nowhere/at/all.toml", "."])
def test_a_file_that_does_not_exist_is_refused(what: str) -> None:
    with pytest.raises(ClusterError, match="neither built in nor as a file"):
        load_cluster(what)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ClusterError, match="cannot be read"):
        load_cluster(str(path))


# Built in


def test_all_clusters_of_the_papers_and_the_lab_are_built_in() -> None:
    models = ("resnet32", "alexnet", "vgg16", "inception")
    asked = {f"r2sp-{kind}-{model}" for kind in ("a", "table1") for model in models}
    labs = {"lab-5mb", "lab-1mb", "lab-unequal", "lab-vgg16"}
    learned = {"dssp-homogeneous-alexnet", "dssp-homogeneous-resnet", "r2sp-nlp-bert", "r2sp-nlp-t5"}
    federated = {f"fl-{model}{kind}" for model in ("cnn", "lstm", "resnet20") for kind in ("", "-literal")}
    others = {"r2sp-b", "dssp-mixed", "rlp-10", "resnet20-100mbit"}
    assert asked | labs | learned | federated | others == set(builtin_names())


@pytest.mark.parametrize("name", builtin_names())
def test_built_in_clusters_load(name: str) -> None:
    spec = load_cluster(name)
    assert spec.name == name
    assert 0 < limit_seconds(spec, streamed=True) <= limit_seconds(spec, streamed=False)
    line = describe(name)
    assert line.endswith(".")
    assert 20 < len(line) < 100


@pytest.mark.parametrize("kind", ["a", "table1"])
@pytest.mark.parametrize("model", ["resnet32", "alexnet", "vgg16", "inception"])
def test_the_clusters_are_as_large_as_in_the_paper(kind: str, model: str) -> None:
    spec = load_cluster(f"r2sp-{kind}-{model}")
    assert (len(spec.workers), spec.servers) == ((16, 4) if kind == "a" else (8, 2))
    assert spec.model_bytes == {"resnet32": 50e6, "alexnet": 240e6, "vgg16": 552e6, "inception": 108e6}[model]


# Units


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        (5, 5.0),
        (2.5e6, 2.5e6),
        ("7B", 7.0),
        ("1kB", 1e3),
        ("1KB", 1e3),
        ("552MB", 552e6),
        ("1.5 GB", 1.5e9),
        ("2TB", 2e12),
        ("1KiB", 1024.0),
        ("1MiB", 2.0**20),
        ("3GiB", 3 * 2.0**30),
        (" 1e3MB ", 1e9),
    ],
)
def test_sizes_are_read(text: object, bytes_: float) -> None:
    assert units.size(text) == bytes_


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        (100, 100.0),
        ("10Gbit", 1.25e9),
        ("10Gbit/s", 1.25e9),
        ("10Gbps", 1.25e9),
        ("8kbit", 1e3),
        ("488MB/s", 488e6),
        ("1GB", 1e9),
        ("100 Mbit", 12.5e6),
    ],
)
def test_rates_are_read(text: object, rate: float) -> None:
    assert units.rate(text) == rate


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(0.25, 0.25), ("1s", 1.0), ("20ms", 0.02), ("50us", 50e-6), ("50µs", 50e-6), ("3ns", 3e-9), ("2min", 120.0)],
)
def test_times_are_read(text: object, seconds: float) -> None:
    assert units.seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "MB", "1..2MB", "1,5MB", "5 MB/s", "0x10B", "5m", None, [], {}, True, "5mb"])
def test_a_wrong_size_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        units.size(value)


@pytest.mark.parametrize("value", ["10", "10G", "10gbit", "10Gbit/m", "fast", False, float("inf")])
def test_a_wrong_rate_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        units.rate(value)


@pytest.mark.parametrize("value", ["10", "1h", "1 second", "s", True, float("nan")])
def test_a_wrong_time_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        units.seconds(value)


def test_a_server_may_have_different_rates_in_and_out() -> None:
    spec = parse_cluster(
        sample('link = "10Gbit"            #', 'link = "10Gbit"\nlink_in = "1Gbit"            #'), "a", "a"
    )
    assert (spec.capacity("in"), spec.capacity("out")) == (4 * 125e6, 4 * 1.25e9)
    plain = parse_cluster(sample("", ""), "a", "a")
    assert plain.capacity("in") == plain.capacity("out")
