"""Names and options: how they make a policy, and the errors for wrong ones."""

import inspect
import string
import sys
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.policies import (
    Decision,
    Policy,
    PolicyError,
    Range,
    is_same_policy,
    make,
    names,
    policy_class,
    policy_options,
    register,
    split_list,
    with_mean_weights,
    without_mean_weights,
)
from paceline.policies import registry as registry_module
from paceline.policies.asp import ASP
from paceline.policies.bsp import BSP
from paceline.policies.dssp import DSSP
from paceline.policies.groups import Groups
from paceline.policies.options import Option
from paceline.policies.r2sp import R2SP
from paceline.policies.registry import split_spec
from paceline.policies.ssp import SSP
from tries import tries


class Mine(SSP):
    """A user's policy with the options of SSP."""


class Plain(ASP):
    """A policy without options."""

    def __init__(self) -> None:
        super().__init__()


class Demanding(ASP):
    """A policy with an option that has no default."""

    def __init__(self, colour: int) -> None:
        super().__init__()


class Bare(Policy):
    """A policy without an `__init__`."""

    def joined(self, worker: Any, now: float) -> list[Decision]:
        return []

    def arrived(self, update: Any, now: float) -> list[Decision]:
        return []

    def left(self, worker: Any, now: float) -> list[Decision]:
        return []


# Names


@pytest.mark.parametrize("name", names())
def test_every_name_makes_a_policy_with_a_summary_and_documented_options(name: str) -> None:
    policy = make(name)
    assert isinstance(policy, policy_class(name))
    assert policy.summary
    assert "\n" not in policy.summary
    for option in policy_options(name).values():
        assert option.help, f"{name}: {option.name} is not explained"
        assert option.default is not inspect.Parameter.empty
        assert option.accepts(option.default), f"{name}: the default of {option.name} is not allowed"


def test_options_make_the_policy_they_describe() -> None:
    assert make("ssp").staleness == 3  # type: ignore[attr-defined]
    assert make("ssp:staleness=5").staleness == 5  # type: ignore[attr-defined]
    dssp = make(" dssp : low=2 , high = 9 , bound = none ".replace(" : ", ":"))
    assert isinstance(dssp, DSSP)
    assert (dssp.low, dssp.high, dssp.bound) == (2, 9, "none")
    assert make("bsp:pipeline = FALSE").pipelined is False
    r2sp = make("r2sp:relax=0.5,groups=auto,tune_batches=true")
    assert isinstance(r2sp, R2SP)
    assert r2sp.relax == 0.5
    assert r2sp.search is not None and r2sp.tuner is not None
    assert make("r2sp:groups=3").most_seats == 3  # type: ignore[attr-defined]


def test_a_policy_can_be_an_option_of_another() -> None:
    policy = make("groups:count=8,inner=(bsp:fraction=0.75,weights=mean),outer=r2sp")
    assert isinstance(policy, Groups)
    assert isinstance(policy.inner, BSP) and policy.inner.fraction == 0.75
    assert isinstance(policy.outer, R2SP)
    nested = make("groups:inner=(groups:count=2,inner=(ssp:staleness=1),outer=asp),outer=(ksync:k=2)")
    assert nested.inner.inner.staleness == 1  # type: ignore[attr-defined]


def test_a_users_own_class_is_named_by_module_and_class() -> None:
    assert type(make(f"{__name__}:Mine")) is Mine
    assert make(f"{__name__}:Mine:staleness=7").staleness == 7  # type: ignore[attr-defined]
    assert type(make(f"{__name__}:Bare")) is Bare
    assert list(policy_options(f"{__name__}:Mine")) == ["staleness", "weights", "wait"]
    assert policy_options(f"{__name__}:Bare") == {}


def test_a_name_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_KNOWN", dict(registry_module._KNOWN))
    register("mine", f"{__name__}:Mine")
    assert "mine" in names()
    assert type(make("mine:staleness=1")) is Mine
    with pytest.raises(PolicyError, match="plain word"):
        register("not a word", f"{__name__}:Mine")


# Lists


@pytest.mark.parametrize(
    ("texts", "specs"),
    [
        (["bsp"], ["bsp"]),
        (["bsp,ssp:staleness=5,r2sp"], ["bsp", "ssp:staleness=5", "r2sp"]),
        (["dssp:low=3,high=15,bsp"], ["dssp:low=3,high=15", "bsp"]),
        (["dssp,low=3,high=15"], ["dssp:low=3,high=15"]),
        (["bsp", "asp,r2sp"], ["bsp", "asp", "r2sp"]),
        ([" bsp , asp "], ["bsp", "asp"]),
        (["groups:inner=(bsp:fraction=0.5,weights=mean),count=2,asp"],
         ["groups:inner=(bsp:fraction=0.5,weights=mean),count=2", "asp"]),
        (["my.module:Class,x=1,bsp:backup=1"], ["my.module:Class:x=1", "bsp:backup=1"]),
    ],
)  # fmt: skip
def test_a_key_after_a_comma_belongs_to_the_policy_before_it(texts: list[str], specs: list[str]) -> None:
    assert split_list(texts) == specs


def test_a_listed_class_takes_its_options() -> None:
    (spec,) = split_list([f"{__name__}:Mine,staleness=2"])
    assert make(spec).staleness == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("low=3,dssp", "'low=3' must come after the name of a policy"),
        ("bsp,,asp", "has an empty item"),
        ("", "has an empty item"),
        ("groups:inner=(bsp", "parentheses .* do not match"),
        ("groups:inner=bsp)", "parentheses .* do not match"),
        (")(", "parentheses .* do not match"),
    ],
)
def test_an_invalid_list_is_refused(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        split_list([text])


# The weights of a real job


@st.composite
def specs(draw: st.DrawFn, depth: int = 2) -> str:
    """Any registered policy with any of its options. A policy that is an option has options of its own."""
    name = draw(st.sampled_from([*names(), f"{__name__}:Mine", f"{__name__}:Bare"]))
    written = []
    for key, option in policy_options(name).items():
        texts = [text for text in (*option.words, "true", "false", "1", "2", "0.5") if accepted(option, text)]
        if option.takes(Policy) and depth:
            texts = [f"({draw(specs(depth - 1))})"]
        if draw(st.booleans()) and texts:
            written.append(f"{key}={draw(st.sampled_from(texts))}")
    return f"{name}:{','.join(written)}" if written else name


def accepted(option: Option, text: str) -> bool:
    try:
        return str not in option.kinds and option.accepts(option.parse(text))
    except ValueError:
        return False


def weights_in(policy: Policy) -> list[str]:
    """The weights of a policy and of the policies inside it."""
    inside = [getattr(policy, part) for part in ("inner", "outer", "policy") if hasattr(policy, part)]
    own = [policy.weigher.kind] if hasattr(policy, "weigher") else []
    return own + [each for part in inside for each in weights_in(part)]


@given(specs())
@tries(60, 300)
def test_a_real_job_uses_mean_weights_unless_the_spec_names_others(spec: str) -> None:
    try:
        before = weights_in(make(spec))
    except PolicyError:
        assume(False)
    explicit = with_mean_weights(spec)
    assert weights_in(make(explicit)).count("sum") == spec.count("weights=sum")
    assert type(make(explicit)) is type(make(spec))
    assert with_mean_weights(explicit) == explicit
    assert is_same_policy(spec, explicit)
    if before.count("sum") == spec.count("weights=sum"):
        assert explicit == spec, "nothing was left to a default of weights=sum"
    (name, given), (same_name, kept) = split_spec(spec), split_spec(explicit)
    assert name == same_name
    nested = {key for key, option in policy_options(name).items() if option.takes(Policy)}
    assert [each for each in given if each[0] not in nested] == [
        each for each in kept if each[0] not in nested and each in given
    ]


@pytest.mark.parametrize(
    ("spec", "explicit"),
    [
        ("r2sp", "r2sp:weights=mean"),
        ("r2sp:groups=auto", "r2sp:groups=auto,weights=mean"),
        ("r2sp:weights=sum", "r2sp:weights=sum"),
        ("groups", "groups:inner=(bsp:weights=mean),outer=(r2sp:weights=mean)"),
        (
            "groups:count=8,inner=(bsp:fraction=0.75)",
            "groups:count=8,inner=(bsp:fraction=0.75,weights=mean),outer=(r2sp:weights=mean)",
        ),
        ("filtered:policy=asp", "filtered:policy=(asp:weights=mean)"),
        ("filtered", "filtered"),
        ("fl-r2sp", "fl-r2sp"),
        ("fedbuff:k=3", "fedbuff:k=3"),
        (f"{__name__}:Mine", f"{__name__}:Mine:weights=mean"),
        (f"{__name__}:Plain", f"{__name__}:Plain"),
    ],
)
def test_the_explicit_spec_of_a_real_job(spec: str, explicit: str) -> None:
    assert with_mean_weights(spec) == explicit


def test_a_mistake_in_a_spec_is_not_hidden() -> None:
    for wrong in ("r2sp:weights=sum,weights=mean", "r2sp:nope=1"):
        with pytest.raises(PolicyError):
            make(with_mean_weights(wrong))
    with pytest.raises(PolicyError, match="There is no policy 'nope'"):
        with_mean_weights("groups:inner=nope")


def test_a_checkpoint_of_another_policy_is_told_apart_and_imports_nothing() -> None:
    for saved, current in (
        ("r2sp", "asp:weights=mean"),
        ("r2sp", "r2sp:groups=2,weights=mean"),
        ("r2sp:weights=sum", "r2sp:weights=mean"),
        ("r2sp", "r2sp:weights=sum"),
        ("this:Zen", "r2sp:weights=mean"),
        ("", "r2sp:weights=mean"),
    ):
        assert not is_same_policy(saved, current)
    assert "this" not in sys.modules


# Wrong input


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bspp", "There is no policy 'bspp'. Did you mean 'bsp'? Known policies: " + ", ".join(names()) + "."),
        ("sync", "There is no policy 'sync'. Did you mean 'ksync'? Known policies: " + ", ".join(names()) + "."),
        ("ssp:stale=3", "ssp has no option 'stale'. Did you mean 'staleness'? Its options: staleness, weights, wait."),
        ("test:x=1", "There is no policy 'test'. Known policies: " + ", ".join(names()) + "."),
        ("ssp:staleness=-1", "ssp: staleness must be a whole number of at least 0, not '-1'."),
        ("ssp:staleness=1.5", "ssp: staleness must be a whole number of at least 0, not '1.5'."),
        ("ssp:staleness=", "ssp: staleness must be a whole number of at least 0, not ''."),
        ("ssp:staleness=1,staleness=2", "ssp: staleness is given twice."),
        ("ssp:5", "ssp: write options as key=value, not '5'."),
        ("ssp:=5", "ssp: write options as key=value, not '=5'."),
        ("bsp:fraction=0", "bsp: fraction must be a number above 0 and at most 1, not '0'."),
        ("bsp:fraction=nan", "bsp: fraction must be a number above 0 and at most 1, not 'nan'."),
        ("bsp:tune_batches=yes", "bsp: tune_batches must be true or false, not 'yes'."),
        ("r2sp:relax=0", "r2sp: relax must be a number above 0 and at most 2, not '0'."),
        ("r2sp:relax=7", "r2sp: relax must be a number above 0 and at most 2, not '7'."),
        ("r2sp:relax=inf", "r2sp: relax must be a number above 0 and at most 2, not 'inf'."),
        ("bsp:max_growth=inf", "bsp: max_growth must be a number of at least 1, not 'inf'."),
        ("r2sp:groups=some", "r2sp: groups must be all or auto or a whole number of at least 1, not 'some'."),
        ("r2sp:groups=0", "r2sp: groups must be all or auto or a whole number of at least 1, not '0'."),
        ("asp:weights=median", "asp: weights must be sum or mean or equal, not 'median'."),
        ("ksync:k=0", "ksync: k must be a whole number of at least 1, not '0'."),
        ("dssp:low=5,high=3", "dssp: high must be at least low (5); got 3."),
        ("safa:fraction=2", "safa: fraction must be a number above 0 and at most 1, not '2'."),
        ("groups:inner=nope", "There is no policy 'nope'. Known policies: " + ", ".join(names()) + "."),
        ("groups:inner=(ksync:nope=1)", "ksync has no option 'nope'. Its options: k, weights."),
        (":k=1", "The policy's name is missing; write for example 'ssp:staleness=3'."),
        ("no.such.module:Class", "'no.such.module:Class' cannot be loaded as a policy: No module named 'no'."),
        (
            "string:Nothing",
            "'string:Nothing' cannot be loaded as a policy: module 'string' has no attribute 'Nothing'.",
        ),
        (
            "string:Formatter",
            "'string:Formatter' is not a policy: it must be a concrete subclass of paceline.policies.Policy.",
        ),
        (
            "paceline.policies:Policy",
            "'paceline.policies:Policy' is not a policy: it must be a concrete subclass of paceline.policies.Policy.",
        ),
        (f"{__name__}:Plain:x=1", f"{__name__}:Plain has no option 'x'. Its options: none."),
        (f"{__name__}:Demanding", f"{__name__}:Demanding: colour is missing; it must be a whole number."),
    ],
)  # fmt: skip
def test_the_error_for_a_wrong_spec_says_what_is_allowed(spec: str, message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        make(spec)
    assert str(caught.value) == message


def test_direct_construction_is_checked_too() -> None:
    with pytest.raises(PolicyError, match="ssp: staleness must be a whole number of at least 0, not '-1'"):
        SSP(staleness=-1)
    with pytest.raises(PolicyError, match="ssp: staleness must be a whole number"):
        SSP("3")  # type: ignore[arg-type]
    with pytest.raises(
        PolicyError, match="r2sp: groups must be all or auto or a whole number of at least 1, not 'many'"
    ):
        R2SP(groups="many")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="bsp: tune_batches must be true or false"):
        BSP(tune_batches=1)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="ssp: staleness must be"):
        SSP(staleness=True)
    with pytest.raises(PolicyError, match="mine: staleness must be"):
        Mine(staleness=-1)
    assert R2SP(groups=2, relax=1).relax == 1


def test_a_range_describes_what_it_allows() -> None:
    assert str(Range(0)) == "of at least 0"
    assert str(Range(1, 5)) == "from 1 to 5"
    assert str(Range(high=2)) == "of at most 2"
    assert str(Range(0, open_low=True)) == "above 0"
    assert not Range(0, 1, open_low=True).allows(0)
    assert Range(0, 1, open_low=True).allows(1)


WORDS = [
    *names(),
    *string.punctuation,
    "k",
    "low",
    "inner",
    "outer",
    "weights",
    "=",
    ":",
    "(",
    ")",
    ",",
    "0",
    "1",
    "true",
    "sum",
]


@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
@tries(100, 500)
def test_any_text_makes_a_policy_or_a_one_sentence_error(text: str) -> None:
    try:
        for spec in split_list([text]):
            assert isinstance(make(spec), Policy)
    except PolicyError as error:
        assert str(error).endswith(".")


@pytest.mark.parametrize("spec", ["bsp", "r2sp:groups=2", "ssp:staleness=3", "groups:inner=asp,outer=r2sp", "safa"])
def test_a_spec_is_shown_without_the_weights_of_a_real_job(spec: str) -> None:
    full = with_mean_weights(spec)
    assert without_mean_weights(full) == spec
    assert with_mean_weights(without_mean_weights(full)) == full


@pytest.mark.parametrize("spec", ["r2sp:weights=sum", "unknown:weights=mean", "ssp:staleness=1,weights=sum"])
def test_other_weights_and_unknown_policies_are_shown_as_they_are(spec: str) -> None:
    assert without_mean_weights(spec) == spec
