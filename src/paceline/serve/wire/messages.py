"""The messages of the wire protocol. Each is a small typed struct; tensor bytes travel beside it as its body.

    worker → coordinator    Join, Resume, OfferWeights, RequestSamples, GradientStarted, GradientReady, EndVisit,
                            ReportMetric, FinishTraining, Heartbeat, Leave
    coordinator → worker    Welcome, Resumed, ShardMoved, ProvideWeights, KeepWeights, GrantIteration, SampleRange,
                            PushNow, VisitShard, CancelIteration, Excluded, TrainingFinished, Heartbeat, Leave,
                            Expelled, Refused
    worker → shard          Hello, InitialWeights (+ weights), InitialState (+ state), RequestPush, Push (+ gradient),
                            Pull, PullState
    shard → worker          InitialWeightsReceived, AllowPush, PushReceived, UpdatedPiece (+ weights),
                            Weights (+ weights), OptimizerState (+ state), Expelled, Refused
    shard → coordinator     Register, CheckpointLoaded, InitialWeightsReceived, UpdateReceived, UpdateHeld,
                            UpdateProducts, PartSaved, ShardFailed, PeerRejected, BackupUnreachable, ShardHeartbeat
    coordinator → shard     Registered, Setup, InitialWeightsFrom, AddToSum, ApplyUpdates, StreamUpdates, DropUpdate,
                            KeepUpdate, Fence, SavePart, ContinueAlone, TakeOver, Stop, ShardHeartbeat,
                            Refused
    shard → its backup      as worker → shard: Hello, InitialWeights, InitialState, Push
    observer → coordinator  Subscribe, InspectExclusions
    coordinator → observer  TraceEvents, Exclusions, Refused

Every conversation begins with the handshake: Challenge, Proof, Accepted or Refused.

Worker, incarnation and iteration identify an update. A shard applies an update once, even if the worker sends it twice.
The coordinator gives a worker a new incarnation number each time it joins, and refuses messages of older incarnations.
A worker that loses its connection sends Resume on a new one. Both sides then repeat what was not answered. A shard that
loses its connection to the coordinator sends Register on a new one. Both sides then send again what was not received.

Each conversation has a file of its own. This module has the names of all of them.
"""

from __future__ import annotations

from paceline.job.identity import Identity as Identity
from paceline.serve.wire.message_base import Accepted as Accepted
from paceline.serve.wire.message_base import Challenge as Challenge
from paceline.serve.wire.message_base import Expelled as Expelled
from paceline.serve.wire.message_base import Heartbeat as Heartbeat
from paceline.serve.wire.message_base import Message as Message
from paceline.serve.wire.message_base import Proof as Proof
from paceline.serve.wire.message_base import Ranges as Ranges
from paceline.serve.wire.message_base import Refused as Refused
from paceline.serve.wire.observer_messages import Exclusions as Exclusions
from paceline.serve.wire.observer_messages import InspectExclusions as InspectExclusions
from paceline.serve.wire.observer_messages import Subscribe as Subscribe
from paceline.serve.wire.observer_messages import TraceEvents as TraceEvents
from paceline.serve.wire.shard_messages import ANY_NUMBER as ANY_NUMBER
from paceline.serve.wire.shard_messages import AddToSum as AddToSum
from paceline.serve.wire.shard_messages import ApplyUpdates as ApplyUpdates
from paceline.serve.wire.shard_messages import BackupUnreachable as BackupUnreachable
from paceline.serve.wire.shard_messages import CheckpointLoaded as CheckpointLoaded
from paceline.serve.wire.shard_messages import ContinueAlone as ContinueAlone
from paceline.serve.wire.shard_messages import DropUpdate as DropUpdate
from paceline.serve.wire.shard_messages import Fence as Fence
from paceline.serve.wire.shard_messages import InitialWeightsFrom as InitialWeightsFrom
from paceline.serve.wire.shard_messages import KeepUpdate as KeepUpdate
from paceline.serve.wire.shard_messages import PartSaved as PartSaved
from paceline.serve.wire.shard_messages import PeerRejected as PeerRejected
from paceline.serve.wire.shard_messages import Register as Register
from paceline.serve.wire.shard_messages import Registered as Registered
from paceline.serve.wire.shard_messages import SavePart as SavePart
from paceline.serve.wire.shard_messages import Setup as Setup
from paceline.serve.wire.shard_messages import ShardFailed as ShardFailed
from paceline.serve.wire.shard_messages import ShardHeartbeat as ShardHeartbeat
from paceline.serve.wire.shard_messages import Stop as Stop
from paceline.serve.wire.shard_messages import StreamUpdates as StreamUpdates
from paceline.serve.wire.shard_messages import TakeOver as TakeOver
from paceline.serve.wire.shard_messages import UpdateHeld as UpdateHeld
from paceline.serve.wire.shard_messages import UpdateProducts as UpdateProducts
from paceline.serve.wire.shard_messages import UpdateReceived as UpdateReceived
from paceline.serve.wire.transfer_messages import AllowPush as AllowPush
from paceline.serve.wire.transfer_messages import Hello as Hello
from paceline.serve.wire.transfer_messages import InitialState as InitialState
from paceline.serve.wire.transfer_messages import InitialWeights as InitialWeights
from paceline.serve.wire.transfer_messages import InitialWeightsReceived as InitialWeightsReceived
from paceline.serve.wire.transfer_messages import OptimizerState as OptimizerState
from paceline.serve.wire.transfer_messages import Pull as Pull
from paceline.serve.wire.transfer_messages import PullState as PullState
from paceline.serve.wire.transfer_messages import Push as Push
from paceline.serve.wire.transfer_messages import PushReceived as PushReceived
from paceline.serve.wire.transfer_messages import RequestPush as RequestPush
from paceline.serve.wire.transfer_messages import UpdatedPiece as UpdatedPiece
from paceline.serve.wire.transfer_messages import Weights as Weights
from paceline.serve.wire.worker_messages import CancelIteration as CancelIteration
from paceline.serve.wire.worker_messages import EndVisit as EndVisit
from paceline.serve.wire.worker_messages import Excluded as Excluded
from paceline.serve.wire.worker_messages import FinishTraining as FinishTraining
from paceline.serve.wire.worker_messages import GradientReady as GradientReady
from paceline.serve.wire.worker_messages import GradientStarted as GradientStarted
from paceline.serve.wire.worker_messages import GrantIteration as GrantIteration
from paceline.serve.wire.worker_messages import Join as Join
from paceline.serve.wire.worker_messages import KeepWeights as KeepWeights
from paceline.serve.wire.worker_messages import Leave as Leave
from paceline.serve.wire.worker_messages import OfferWeights as OfferWeights
from paceline.serve.wire.worker_messages import ProvideWeights as ProvideWeights
from paceline.serve.wire.worker_messages import PushNow as PushNow
from paceline.serve.wire.worker_messages import ReportMetric as ReportMetric
from paceline.serve.wire.worker_messages import RequestSamples as RequestSamples
from paceline.serve.wire.worker_messages import Resume as Resume
from paceline.serve.wire.worker_messages import Resumed as Resumed
from paceline.serve.wire.worker_messages import SampleRange as SampleRange
from paceline.serve.wire.worker_messages import ShardMoved as ShardMoved
from paceline.serve.wire.worker_messages import TrainingFinished as TrainingFinished
from paceline.serve.wire.worker_messages import VisitShard as VisitShard
from paceline.serve.wire.worker_messages import Welcome as Welcome
