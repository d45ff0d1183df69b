"""The policies that the suites run over."""

from __future__ import annotations

from collections.abc import Callable

from paceline.policies import Policy, make, names

STREAMED = " streamed"  # suffix of a spec: the driver applies slices as they arrive

VARIANTS = [
    "bsp:backup=1",
    "bsp:fraction=0.5",
    "bsp:tune_batches=true",
    "bsp:weights=mean",
    "bsp:pipeline=true",
    "bsp:pipeline=true,weights=mean",
    "bsp:pipeline=true,tune_batches=true",
    "ksync:k=2",
    "kbatch:k=2",
    "asp:weights=mean",
    "asp" + STREAMED,
    "asp:weights=mean" + STREAMED,
    "ssp:staleness=0",
    "ssp:staleness=1",
    "ssp:staleness=2,wait=at",
    "ssp:staleness=1,weights=mean" + STREAMED,
    "dssp:low=1,high=3",
    "dssp:low=1,high=3,weights=mean" + STREAMED,
    "dssp:low=1,high=3,bound=none",
    "dssp:bound=staleness",
    "dssp:low=0,high=1,bound=staleness",
    "dssp:low=0,high=0,bound=staleness",
    "dssp:low=1,high=3,bound=staleness,weights=mean" + STREAMED,
    "dssp:low=2,high=2",
    "r2sp:groups=2",
    "r2sp:groups=3,patience=0.5",
    "r2sp:groups=auto",
    "r2sp:tune_batches=true",
    "r2sp:relax=1.5,patience=0.3,weights=mean",
    "r2sp" + STREAMED,
    "r2sp:patience=0.5,tune_batches=true" + STREAMED,
    "r2sp:groups=2" + STREAMED,
    "r2sp:groups=3,patience=0.5,weights=mean" + STREAMED,
    "r2sp:relax=0.3,patience=0.3,weights=mean" + STREAMED,
    "safa:lag=1",
    "safa:limit=3",
    "safa:fraction=1,lag=0,limit=0.5",
    "bsp:fraction=0.5,weights=equal",
    "bsp:running=true",
    "bsp:fraction=0.5,weights=mean,running=true",
    "groups:count=2,inner=(bsp:fraction=0.5,running=true),outer=(ksync:k=1)",
    "groups:count=3,inner=(bsp:running=true,weights=equal),outer=bsp",
    "filtered:policy=(bsp:running=true)",
    "fedbuff:k=3,discount=0",
    "filtered:policy=(r2sp:groups=2)",
    "filtered:policy=r2sp",
    "fl-r2sp:groups=2,fraction=0.5",
    "fl-r2sp:groups=3,moves=model,patience=0.5,filter=false",
    "fl-r2sp:groups=3,fraction=0.8,weights=equal,relax=0.7",
    "fl-r2sp:groups=2,as_printed=true",
    "groups:count=2,inner=(bsp:fraction=0.5)",
    "groups:count=3,inner=asp,outer=r2sp",
    "groups:count=2,inner=bsp,outer=(ssp:staleness=1)",
    "groups:count=2,inner=asp,outer=(ssp:staleness=0)",
    "groups:count=3,inner=bsp,outer=(ksync:k=2)",
    "groups:count=3,inner=(ksync:k=1),outer=(ksync:k=2)",
    "groups:count=3,inner=(kbatch:k=2),outer=(kbatch:k=2)",
    "groups:count=2,inner=bsp,outer=safa",
    "groups:count=3,inner=asp,outer=(safa:lag=0,limit=3)",
    "groups:count=2,inner=(r2sp:groups=2),outer=bsp",
    "groups:count=2,inner=r2sp,outer=r2sp",
    "groups:count=3,inner=r2sp,outer=(ksync:k=1)",
    "groups:count=2,inner=safa,outer=r2sp",
    "groups:count=3,inner=(safa:lag=0,limit=2),outer=(ksync:k=2)",
    "groups:count=2,inner=(groups:count=3,inner=asp,outer=bsp),outer=(dssp:low=1,high=3)",
]
SPECS = [*names(), *VARIANTS]

# Under these, updates of every member are applied again and again if all workers take the same time.
APPLY_ALL_MEMBERS = [
    *("asp", "asp:weights=mean", "asp" + STREAMED, "asp:weights=mean" + STREAMED),
    *("bsp", "bsp:tune_batches=true", "bsp:weights=mean", "bsp:pipeline=true", "bsp:pipeline=true,weights=mean"),
    *("ssp", "ssp:staleness=0", "ssp:staleness=1", "ssp:staleness=2,wait=at"),
    *("dssp", "dssp:low=1,high=3", "dssp:low=1,high=3,bound=none", "dssp:low=2,high=2", "dssp:bound=staleness"),
    *("r2sp", "r2sp:groups=2", "r2sp:groups=auto", "r2sp:tune_batches=true"),
    *("r2sp" + STREAMED, "r2sp:groups=2" + STREAMED),
]
# Under these, some workers may wait for very long. When the fastest group cancels the others, their rings start anew
# with a pilot, which may never finish in time. And the other groups leave behind a group whose ring was slow for a
# while.
MAY_WAIT_LONG = ["groups:count=3,inner=r2sp,outer=(ksync:k=1)", "groups:count=2,inner=r2sp,outer=r2sp"]


def fresh(spec: str) -> Callable[[], Policy]:
    """Return a function that makes new policies of this spec, streamed if the spec says so."""

    def made() -> Policy:
        policy = make(spec.removesuffix(STREAMED))
        if spec.endswith(STREAMED):
            assert policy.streamable
            policy.streamed = True
        return policy

    return made
